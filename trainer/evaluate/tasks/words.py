"""Words of keys, of lists, of codes and of variables."""

from __future__ import annotations

import itertools
import string

import numpy as np

_ADJECTIVES = """
able amber ancient brave brief bright brisk broad calm careful clean clever cold curious daring deep eager early
easy empty even fair famous fancy fast fine firm fresh gentle giant glad golden good grand great green happy heavy
hidden honest hollow humble icy idle jolly keen kind large late lazy light little lively lone long loud loyal lucky
mellow merry mild modest narrow neat new nimble noble odd old open pale patient plain polite proud pure quick quiet
rapid rare ready red rich ripe robust rough round royal rural rusty safe sandy secret shady sharp shiny short shy
silent silver simple slim slow small smooth soft solid spare steady steep still strange strong sturdy subtle sunny
sweet swift tall tame tender thick thin tidy tiny vast vivid warm wide wild wise witty young
"""
_NOUNS = """
anchor apple arrow badge bakery barn basket beach bell bench bird blanket board boat bottle bowl branch bread brick
bridge brush bucket button cabin camera candle canyon carpet castle chair cherry circle clock cloud coast coin
copper corner cotton cradle crater crown cup curtain desert desk door drawer drum eagle engine fabric feather fence
field flag flame flower forest fountain garden gate glass glove grape guitar hammer harbor hat hill horse hotel
island jacket jar jewel juice kettle key kitchen kite ladder lake lamp lantern leaf lemon letter library lighthouse
lion magnet map maple market meadow melon mirror mountain museum needle nest novel oak ocean onion orange orchard
otter oven owl paddle painter palace paper parrot peach pebble pencil pepper piano pillow pine pirate planet plate
pocket pond poppy puzzle rabbit radio raft rail raven ribbon river road robot rocket roof rope rose sail salad
saddle school shell shelf ship shirt shoe shore sister sketch sofa spoon spring stable stairs star statue stone
storm street sugar sword table tailor tea temple tent theater ticket tiger tower train tree trumpet tulip tunnel
turtle valley vase village violin voyage wagon wallet water whale wheel willow window winter wolf yard zebra
"""
ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())

_SYLLABLES = tuple(consonant + vowel for consonant in "bdfghjklmnprstvz" for vowel in "aeiou")
NUM_SYLLABIC_WORDS = len(_SYLLABLES) ** 3


def draw_keys(rng: np.random.Generator, num_keys: int, text: str) -> list[str] | None:
    """Distinct pairs of an adjective and a noun, none of which is in a text; None: there are too few."""
    numbers = rng.permutation(len(ADJECTIVES) * len(NOUNS)).tolist()
    keys = (f"{ADJECTIVES[number // len(NOUNS)]}-{NOUNS[number % len(NOUNS)]}" for number in numbers)
    drawn = list(itertools.islice((key for key in keys if key not in text), num_keys))
    return drawn if len(drawn) == num_keys else None


def draw_numbers(rng: np.random.Generator, num_numbers: int, num_digits: int) -> list[str]:
    """Distinct numbers without a leading zero."""
    least = 10 ** (num_digits - 1)
    return [str(least + number) for number in rng.choice(9 * least, num_numbers, replace=False).tolist()]


def draw_letters(rng: np.random.Generator, num_words: int, num_letters: int) -> list[str]:
    """Distinct words of random lower-case letters. A larger number of words begins with the same words."""
    words: dict[str, None] = {}
    while len(words) < num_words:
        letters = rng.integers(len(string.ascii_lowercase), size=num_letters).tolist()
        words["".join(string.ascii_lowercase[letter] for letter in letters)] = None
    return list(words)


def syllabic_word(number: int) -> str:
    """One of `NUM_SYLLABIC_WORDS` words of six letters."""
    first, rest = divmod(number, len(_SYLLABLES) ** 2)
    second, third = divmod(rest, len(_SYLLABLES))
    return _SYLLABLES[first] + _SYLLABLES[second] + _SYLLABLES[third]
