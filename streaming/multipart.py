"""multipart/form-data read as it streams in: fields in memory, one file on its way to disk, all of it counted.

File names and part headers besides the field's name are ignored; nothing a client says names a path.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from ..engine.errors import InvalidRequest, Overloaded
from .exchange import Exchange
from .protocol import RequestTooLarge, UnsupportedMediaType
from .service import Service

_IN_MEMORY = 8 * 1024 * 1024  # bytes of a file before it goes to disk
_MAX_PARTS = 512
_MAX_HEADER_BYTES = 8 * 1024  # of one part


@dataclass
class Form:
    """A form that was read. `close` when the file is done with."""

    fields: list[tuple[str, str]] = field(default_factory=list)
    file: IO[bytes] | None = None
    file_bytes: int = 0
    service: Service | None = None  # whose room for uploads the file takes

    def take(self, data: bytes) -> None:
        """More of the file. Raises Overloaded when all uploads together take too much room."""
        assert self.file is not None and self.service is not None
        if self.service.upload_bytes + len(data) > self.service.config.max_uploads_bytes:
            raise Overloaded("other uploads take all the room there is", retry_after_s=5.0)
        self.service.upload_bytes += len(data)
        self.file_bytes += len(data)
        self.file.write(data)

    def close(self) -> None:
        """Twice is fine."""
        if self.file is not None and self.service is not None:
            self.file.close()
            self.service.upload_bytes -= self.file_bytes
            self.service = None


class InvalidForm(InvalidRequest):
    code = "invalid_form"


async def read_form(exchange: Exchange, *, file_field: str, max_file_bytes: int, max_field_bytes: int) -> Form:
    """Read the request's form; `max_field_bytes` bounds all fields together.

    Raises UnsupportedMediaType, RequestTooLarge, RequestTimeout, InvalidForm.
    """
    kind, options = parse_options_header(exchange.fields.get(b"content-type", b""))
    limit = max_file_bytes + max_field_bytes
    if kind != b"multipart/form-data":
        await exchange.discard(exchange.service.config.max_body_bytes)
        raise UnsupportedMediaType(f"expected content-type multipart/form-data, got {kind.decode('latin-1')[:80]!r}")
    reader = _Reader(exchange.service, file_field, max_file_bytes, max_field_bytes)
    try:
        parser = reader.parser(options.get(b"boundary", b""))
        async for chunk in exchange.chunks(limit, upload=True):
            parser.write(chunk)
        parser.finalize()
        if not reader.ended:
            raise InvalidForm("the form ends before its last boundary")
    except FormParserError:
        reader.form.close()
        await exchange.discard(limit)
        raise InvalidForm("the body is not valid multipart/form-data") from None
    except (InvalidRequest, RequestTooLarge, Overloaded):
        reader.form.close()
        await exchange.discard(limit)
        raise
    except BaseException:
        reader.form.close()
        raise
    return reader.form


class _Reader:
    """The parser's callbacks."""

    def __init__(self, service: Service, file_field: str, max_file_bytes: int, max_field_bytes: int) -> None:
        self.form = Form(service=service)
        self.ended = False
        self._file_field = file_field
        self._max_file_bytes = max_file_bytes
        self._field_room = max_field_bytes
        self._num_parts = 0
        self._name = ""
        self._value = bytearray()
        self._header = (bytearray(), bytearray())
        self._write: Callable[[bytes], object] = self._value.extend

    def parser(self, boundary: bytes) -> MultipartParser:
        if not boundary:
            raise InvalidForm("content-type: multipart/form-data needs a boundary")
        return MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begins,
                "on_header_field": lambda data, start, end: self._take_header(0, data[start:end]),
                "on_header_value": lambda data, start, end: self._take_header(1, data[start:end]),
                "on_header_end": self._header_ends,
                "on_headers_finished": self._headers_end,
                "on_part_data": lambda data, start, end: self._take(data[start:end]),
                "on_part_end": self._part_ends,
                "on_end": self._end,
            },
        )

    def _part_begins(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise InvalidForm(f"the form has more than {_MAX_PARTS} parts")
        self._name = ""
        self._value = bytearray()
        self._header = (bytearray(), bytearray())

    def _take_header(self, which: int, data: bytes) -> None:
        self._header[which].extend(data)
        if len(self._header[which]) > _MAX_HEADER_BYTES:
            raise InvalidForm("a part of the form has too long headers")

    def _header_ends(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(value))
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
        name.clear()
        value.clear()

    def _headers_end(self) -> None:
        if not self._name:
            raise InvalidForm("a part of the form has no name")
        if self._name != self._file_field:
            self._write = self._take_field
            return
        if self.form.file is not None:
            raise InvalidForm(f"{self._file_field}: expected one file, got several", param=self._file_field)
        self.form.file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)
        self._write = self._take_file

    def _take(self, data: bytes) -> None:
        self._write(data)

    def _take_field(self, data: bytes) -> None:
        self._field_room -= len(data)
        if self._field_room < 0:
            raise RequestTooLarge(f"{self._name[:80]}: the form's fields are too large", param=self._name[:80])
        self._value.extend(data)

    def _take_file(self, data: bytes) -> None:
        if self.form.file_bytes + len(data) > self._max_file_bytes:
            raise RequestTooLarge(
                f"{self._file_field}: the file has more than {self._max_file_bytes} bytes, which is the limit",
                param=self._file_field,
            )
        self.form.take(data)

    def _part_ends(self) -> None:
        if self._name == self._file_field:
            return
        try:
            self.form.fields.append((self._name, self._value.decode()))
        except UnicodeDecodeError:
            raise InvalidForm(f"{self._name[:80]}: expected UTF-8", param=self._name[:80]) from None

    def _end(self) -> None:
        self.ended = True
        if self.form.file is not None:
            self.form.file.seek(0)
