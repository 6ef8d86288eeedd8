"""How English writes things short, and what it says for them: the tables behind models/speech_text.py."""

from __future__ import annotations

MONTHS = ("january february march april may june july august september october november december").split()
DAYS = "monday tuesday wednesday thursday friday saturday sunday".split()

# Written with a dot. These never end a sentence: a name or a number follows.
BEFORE_SOMETHING = {
    **{"mr": "mister", "mrs": "missis", "ms": "miss", "dr": "doctor", "prof": "professor", "st": "saint"},
    **{
        "gen": "general",
        "sgt": "sergeant",
        "capt": "captain",
        "lt": "lieutenant",
        "col": "colonel",
        "cmdr": "commander",
    },
    **{"rev": "reverend", "hon": "honorable", "sen": "senator", "rep": "representative", "gov": "governor"},
    **{"pres": "president", "mt": "mount", "ft": "fort", "fig": "figure", "eq": "equation", "vol": "volume"},
    **{"e.g": "for example", "i.e": "that is", "vs": "versus", "cf": "compare", "approx": "approximately"},
    **{"messrs": "messieurs", "mme": "madame", "mlle": "mademoiselle", "fr": "father", "viz": "namely", "ca": "circa"},
    **{"est": "established", "ext": "extension", "tel": "telephone", "ch": "chapter", "sec": "section"},
}
# These may end one: it does where a capital letter follows.
MAY_END = {
    **{"etc": "et cetera", "inc": "incorporated", "ltd": "limited", "corp": "corporation", "co": "company"},
    **{
        "jr": "junior",
        "sr": "senior",
        "rd": "road",
        "ave": "avenue",
        "blvd": "boulevard",
        "ln": "lane",
        "hwy": "highway",
    },
    **{"dept": "department", "govt": "government", "univ": "university", "assn": "association", "bros": "brothers"},
    **{"apt": "apartment", "ste": "suite", "max": "maximum", "min": "minimum", "hr": "hour", "hrs": "hours"},
    **{"mins": "minutes", "secs": "seconds", "ed": "edition", "esq": "esquire", "sq": "square", "al": "al"},
    **{"mon": "monday", "tue": "tuesday", "tues": "tuesday", "wed": "wednesday", "thu": "thursday", "thur": "thursday"},
    **{"thurs": "thursday", "fri": "friday", "sat": "saturday", "sun": "sunday"},
    **{month[:3]: month for month in MONTHS if month != "may"},
    **{"sept": "september", "a.m": "a m", "p.m": "p m", "ph.d": "p h d"},
}
# Short words of the language: with a dot they are mostly themselves at the end of a sentence ("in the sun.").
ONLY_CAPITALISED = {
    "sun",
    "sat",
    "wed",
    "mar",
    "jan",
    "jun",
    "jul",
    "mon",
    "co",
    "gen",
    "rep",
    "fig",
    "al",
    "ed",
    "ch",
    "ca",
}

CURRENCIES = {  # one, several, a hundredth, hundredths
    "$": ("dollar", "dollars", "cent", "cents"),
    "€": ("euro", "euros", "cent", "cents"),
    "£": ("pound", "pounds", "penny", "pence"),
    "¥": ("yen", "yen", "", ""),
    "₹": ("rupee", "rupees", "paisa", "paise"),
    "₩": ("won", "won", "", ""),
    "₽": ("ruble", "rubles", "kopeck", "kopecks"),
}
SCALES = {
    **{"k": "thousand", "K": "thousand", "m": "million", "M": "million", "mn": "million", "mm": "million"},
    **{"b": "billion", "B": "billion", "bn": "billion", "t": "trillion", "T": "trillion", "tn": "trillion"},
    **{word: word for word in ("thousand", "million", "billion", "trillion")},
}

# What begins many sentences and few names: before these, "Inc." or "U.S." has ended one.
STARTERS = frozenset(
    "the a an it he she they we i you this that these those there then when what how who why where in on at for but and so "
    "his her our my its their if after before no yes not now".split()
)

_METRIC = {"n": "nano", "µ": "micro", "m": "milli", "c": "centi", "k": "kilo", "": ""}
UNITS = {  # after a number: one, several
    **{f"{short}m": (f"{long}meter", f"{long}meters") for short, long in _METRIC.items()},
    **{
        f"{short}g": (f"{long}gram", f"{long}grams")
        for short, long in _METRIC.items()
        if short not in "nc" or not short
    },
    **{
        f"{short}{size}": (f"{long}liter", f"{long}liters")
        for short, long in _METRIC.items()
        for size in "lL"
        if short in "mc"
    },
    **{f"{short}s": (f"{long}second", f"{long}seconds") for short, long in _METRIC.items() if short and short in "nµm"},
    **{"sec": ("second", "seconds"), "min": ("minute", "minutes"), "h": ("hour", "hours"), "hr": ("hour", "hours")},
    **{"secs": ("second", "seconds"), "mins": ("minute", "minutes"), "hrs": ("hour", "hours")},
    **{"yr": ("year", "years"), "yrs": ("year", "years"), "mo": ("month", "months"), "wk": ("week", "weeks")},
    **{"lb": ("pound", "pounds"), "lbs": ("pound", "pounds"), "oz": ("ounce", "ounces"), "ft": ("foot", "feet")},
    **{"tsp": ("teaspoon", "teaspoons"), "tbsp": ("tablespoon", "tablespoons"), "in.": ("inch", "inches")},
    **{"yd": ("yard", "yards"), "yds": ("yard", "yards"), "mi": ("mile", "miles"), "ha": ("hectare", "hectares")},
    **{"mph": ("mile per hour", "miles per hour"), "kph": ("kilometer per hour", "kilometers per hour")},
    **{"km/h": ("kilometer per hour", "kilometers per hour"), "m/s": ("meter per second", "meters per second")},
    **{"fps": ("frame per second", "frames per second"), "mpg": ("mile per gallon", "miles per gallon")},
    **{"kB": ("kilobyte", "kilobytes"), "KB": ("kilobyte", "kilobytes"), "MB": ("megabyte", "megabytes")},
    **{"GB": ("gigabyte", "gigabytes"), "TB": ("terabyte", "terabytes"), "PB": ("petabyte", "petabytes")},
    **{"Mbps": ("megabit per second", "megabits per second"), "Gbps": ("gigabit per second", "gigabits per second")},
    **{"Hz": ("hertz", "hertz"), "kHz": ("kilohertz", "kilohertz"), "MHz": ("megahertz", "megahertz")},
    **{"GHz": ("gigahertz", "gigahertz"), "W": ("watt", "watts"), "kW": ("kilowatt", "kilowatts")},
    **{"MW": ("megawatt", "megawatts"), "GW": ("gigawatt", "gigawatts"), "kWh": ("kilowatt hour", "kilowatt hours")},
    **{"V": ("volt", "volts"), "mAh": ("milliamp hour", "milliamp hours"), "dB": ("decibel", "decibels")},
    **{"px": ("pixel", "pixels"), "cal": ("calorie", "calories"), "kcal": ("kilocalorie", "kilocalories")},
    **{"°C": ("degree celsius", "degrees celsius"), "°F": ("degree fahrenheit", "degrees fahrenheit")},
    **{"°": ("degree", "degrees"), "%": ("percent", "percent"), "‰": ("per mille", "per mille")},
    **{"sq ft": ("square foot", "square feet"), "sq m": ("square meter", "square meters"), "K": ("k", "k")},
    **{"°K": ("kelvin", "kelvin"), "¢": ("cent", "cents"), "L": ("liter", "liters"), "l": ("liter", "liters")},
    **{"ml": ("milliliter", "milliliters"), "mL": ("milliliter", "milliliters"), "cc": ("c c", "c c")},
}
del UNITS["K"]  # "4K" is a resolution as often as a thousand: its letter is said

# What a bare number of four digits counts; before any other word it is taken for a year.
COUNTED = frozenset(
    "people men women children students soldiers workers employees members voters users guests fans years days hours "
    "minutes seconds weeks months times miles meters kilometers feet pounds dollars euros words units points votes "
    "calories degrees books copies pages grams tons liters acres homes houses jobs cars tickets steps".split()
)

# Capitals that are read as a word: acronyms of their own sound, and words people shout.
SAID_AS_WORDS = frozenset(
    (
        "TODO NASA NATO UNESCO UNICEF OPEC FIFA UEFA AIDS COVID LASER RADAR SCUBA SONAR JPEG GIF RAM ROM LAN WAN PIN SIM SWAT "
        "TED IKEA LEGO ESPN ASCII NAFTA OSHA FEMA NASDAQ CAPTCHA YOLO MIDI BASIC COBOL SARS MERS EBITDA SCOTUS POTUS "
        "I A AM AN AND ARE AS AT BE BUT BY CAN DO FOR GET GO HAS HE HER HIM HIS IF IN IS MAY ME MY NO NOT NOW OF ON OR OUR "
        "OUT OK SEE SHE SO THE TO TOO TWO UP WAS WE WHO WHY YES YET YOU ALL ANY BIG BAD DAY END FUN GOOD GREAT HELP HERE HOW "
        "HUGE JUST KEEP LET LOVE MAKE MORE MOST MUCH MUST NEED NEVER NEW NEXT NICE ONE ONLY OPEN OVER REAL REALLY SAVE SALE "
        "STOP THAT THEM THEN THERE THEY THIS TIME VERY WAIT WANT WARM WELL WHAT WHEN WHERE WILL WITH WORK YOUR FREE BEST "
        "FIRST LAST BOTH EACH EVERY SOME SUCH THAN HAD HAVE BEEN WERE DID DOES DONE HOT TOP WIN WON BUY NOTE READ TRUE FALSE "
        "NONE NULL HELLO HEY HI WOW BYE PLEASE THANK MISS LIVE ALSO EVEN INTO FROM AFTER AGAIN ABOUT ALWAYS"
    ).split()
)
# Letters even where everything around is in capitals, and where they stand in small ones.
SAID_AS_LETTERS = frozenset(
    (
        "usa uk us fbi cia ceo cfo cto tv pc cd dvd usb url ai id ui api sdk cpu gpu faq diy eu un ibm bbc cnn nbc abc hbo "
        "mtv gps sms dna rna hiv nba nfl mlb nhl ufo vip pdf html css http https sql xml json php rss atm suv iq eta asap "
        "rsvp bmw"
    ).split()
)
ONLY_IN_CAPITALS = frozenset(
    "us id un eu ai ui iq eta pc api json".split()
)  # in small letters these are words, or said as such
HUMS = frozenset("hmm mmm hm mm shh sh psst pfft brr nth tsk zzz mr mrs ms vs ll ve re th nd rd st".split())

ROYAL = frozenset(
    "louis henry elizabeth george charles edward william james richard philip paul pius napoleon john alexander catherine "
    "peter nicholas frederick wilhelm leo benedict gregory innocent clement francis ferdinand mary victor margaret harald "
    "rameses ramesses ptolemy darius otto".split()
)
COUNTED_PARTS = (
    "Chapter|Part|Act|Scene|Volume|Book|Section|Article|Phase|Stage|Type|Level|Appendix|Title|Class|Grade|Episode|"
    "Season|Round|Bowl|World War|Figure|Table|Unit|Mark|Group|Step|Lesson"
)

SYMBOLS = {
    **{"&": " and ", "+": " plus ", "=": " equals ", "@": " at ", "%": " percent ", "#": " number ", "×": " times "},
    **{"÷": " divided by ", "±": " plus or minus ", "<": " less than ", ">": " greater than ", "§": " section "},
    **{
        "°": " degrees ",
        "©": " copyright ",
        "√": " square root of ",
        "∞": " infinity ",
        "≈": " about ",
        "≠": " is not ",
    },
    **{
        "≤": " at most ",
        "≥": " at least ",
        "$": " dollar ",
        "€": " euro ",
        "£": " pound ",
        "¥": " yen ",
        "µ": " micro ",
    },
    **{"₹": " rupee ", "₩": " won ", "₽": " ruble ", "¢": " cent ", "‰": " per mille ", "^": " to the power of "},
    **{"~": " about ", "/": " slash ", "\\": " backslash "},
}
LETTER_NAMES = dict(
    zip(
        "abcdefghijklmnopqrstuvwxyz",
        "ay bee see dee ee eff gee aitch eye jay kay el em en oh pee cue are ess tee you vee double+you ex why zee".split(),
    )
)
