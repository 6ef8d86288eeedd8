"""The table of techniques: what it refuses cannot be configured, what it switches off is said."""

from __future__ import annotations

import pytest

from motet.engine.compatibility import TABLE, check_config, techniques, verdict
from motet.engine.config import EngineConfig
from motet.engine.errors import ModelLoadError
from motet.engine.load import load_runner

from .. import tiny

# How to ask for a technique; those that a request asks for are not among them.
ASKED = {
    "speculation": {"speculation": "ngram"}, "overlap": {"depth": 1}, "tensor_parallel": {"tp_size": 2},
    "deterministic": {"deterministic": True}, "int8": {"quantize": "int8"}, "int4": {"quantize": "int4"},
    "fp8": {"quantize": "fp8"}, "bfloat16": {"dtype": "bfloat16"}, "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"}, "cuda": {"device": "cuda"}, "cpu": {"device": "cpu"}, "cuda_graphs": {},
}  # fmt: skip


@pytest.mark.parametrize("pair", [pair for pair in TABLE if pair[0] in ASKED and pair[1] in ASKED])
def test_a_configuration_meets_the_tables_word(pair: tuple[str, str]) -> None:
    settings = ASKED[pair[0]] | ASKED[pair[1]]
    word, why = verdict(*reversed(pair))
    if word == "refused":
        with pytest.raises(ValueError, match="is refused"):
            EngineConfig(**settings)
        return
    config = EngineConfig(**settings)
    assert set(pair) <= techniques(config)
    assert any(f"{pair[1]} is off because of {pair[0]}: {why}" == note for note in check_config(config)) is (
        word == "off"
    )


def test_fp8_needs_a_device_that_has_it() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("the device that auto means has FP8, or says so itself")
    with pytest.raises(ModelLoadError, match="fp8: needs a CUDA device"):
        load_runner(str(tiny.llama()), EngineConfig(quantize="fp8"))
