"""Languages as clients write them and as answers name them: codes in, English names out."""

from __future__ import annotations

from ..engine.errors import InvalidRequest
from ..models.whisper_tokens import LANGUAGES

# In the order of LANGUAGES.
_NAMES = tuple(
    """english chinese german spanish russian korean french japanese portuguese turkish polish catalan dutch arabic swedish
    italian indonesian hindi finnish vietnamese hebrew ukrainian greek malay czech romanian danish hungarian tamil norwegian
    thai urdu croatian bulgarian lithuanian latin maori malayalam welsh slovak telugu persian latvian bengali serbian
    azerbaijani slovenian kannada estonian macedonian breton basque icelandic armenian nepali mongolian bosnian kazakh
    albanian swahili galician marathi punjabi sinhala khmer shona yoruba somali afrikaans occitan georgian belarusian tajik
    sindhi gujarati amharic yiddish lao uzbek faroese haitian_creole pashto turkmen nynorsk maltese sanskrit luxembourgish
    myanmar tibetan tagalog malagasy assamese tatar hawaiian lingala hausa bashkir javanese sundanese cantonese""".split()
)
_NAME_OF = {code: name.replace("_", " ") for code, name in zip(LANGUAGES, _NAMES, strict=True)}
_CODE_OF = {name: code for code, name in _NAME_OF.items()} | {"jv": "jw", "nb": "no", "mandarin": "zh", "burmese": "my"}


def language_code(text: str, param: str = "language") -> str:
    """The code of a language given as code ("en", "en-GB") or English name. Raises InvalidRequest."""
    word = text.strip().lower().replace("_", "-")
    code = word.partition("-")[0]
    if word in _NAME_OF or word in _CODE_OF:
        return word if word in _NAME_OF else _CODE_OF[word]
    if code in _NAME_OF and 1 <= len(word) - len(code) <= 5:  # a region or script after it
        return code
    raise InvalidRequest(f"{param}: expected a language such as 'en', got {text[:40]!r}", param=param)


def language_name(code: str) -> str:
    """The English name, in lower case, as OpenAI's answers have it; an unknown code stays."""
    return _NAME_OF.get(code, code)
