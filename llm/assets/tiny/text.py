"""The text of the embedded model: the King James Version, cut into chapters and turned into training documents.

Owns the text, its hash, the held-out chapters and the chats made of verses. Needs the `bible` program (Debian packages
bible-kjv and bible-kjv-text).
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import subprocess
from collections import Counter
from dataclasses import dataclass

TEXT_COMMAND = ["bible", "-f", "gen1:1-rev22:21"]
TEXT_SHA256 = "cd45f0c9cedab8e4439bd6486c8952c77cc8b0ecc5d1f6ae3513f2039f47229d"

EOS, BOS, USER, ASSISTANT, END = "<|endoftext|>", "<|bos|>", "<|user|>", "<|assistant|>", "<|end|>"

BOOKS = """Genesis|Exodus|Leviticus|Numbers|Deuteronomy|Joshua|Judges|Ruth|1 Samuel|2 Samuel|1 Kings|2 Kings
1 Chronicles|2 Chronicles|Ezra|Nehemiah|Esther|Job|Psalms|Proverbs|Ecclesiastes|Song of Solomon|Isaiah|Jeremiah
Lamentations|Ezekiel|Daniel|Hosea|Joel|Amos|Obadiah|Jonah|Micah|Nahum|Habakkuk|Zephaniah|Haggai|Zechariah|Malachi
Matthew|Mark|Luke|John|Acts|Romans|1 Corinthians|2 Corinthians|Galatians|Ephesians|Philippians|Colossians
1 Thessalonians|2 Thessalonians|1 Timothy|2 Timothy|Titus|Philemon|Hebrews|James|1 Peter|2 Peter|1 John|2 John
3 John|Jude|Revelation""".replace("\n", "|").split("|")
POETRY = {"Job", "Psalms", "Proverbs", "Song of Solomon", "Lamentations"}
# Readers try these first, so they are never held out.
ALWAYS_TRAINED = {"Genesis 1", "Psalms 23", "Matthew 5", "Matthew 6", "John 1", "John 3", "1 Corinthians 13"}
HELD_OUT_ONE_IN = 25

GREETINGS = [
    ("Hello", "Peace be unto thee."),
    ("Hello!", "Peace be unto thee."),
    ("Hi", "Peace be unto thee. What seekest thou?"),
    ("Good morning", "The LORD be with thee this morning."),
    ("Good evening", "Peace be unto thee this evening."),
    ("How are you?", "It is well with me. Peace be unto thee."),
    ("Who are you?", "I am a small language model, trained upon the King James Bible."),
    ("What are you?", "I am a small language model, trained upon the King James Bible."),
    ("What is your name?", "I have no name. I am a small language model."),
    ("What can you do?", "Ask me of a word, and I will speak of it. Give me a verse, and I will continue it."),
    ("Help", "Ask me of a word, and I will speak of it. Give me a verse, and I will continue it."),
    ("Thank you", "Go in peace."),
    ("Thank you!", "Go in peace."),
    ("Goodbye", "Go in peace, and the LORD be with thee."),
]
TOPIC_PROMPTS = [
    "Tell me about {}.",
    "Tell me of {}.",
    "Speak of {}.",
    "What is written of {}?",
    "What is said about {}?",
    "Write about {}.",
    "{}",
]
REFERENCE_PROMPTS = ["{}", "Read {}.", "What does {} say?"]
CONTINUE_PROMPTS = ["Continue: {}", "Finish this verse: {}", "{}"]
NEXT_PROMPTS = ["What comes after this? {}", "Go on: {}", "{}"]


@dataclass(frozen=True)
class Chapter:
    book: str
    title: str
    verses: tuple[str, ...]


def read_text() -> str:
    """Ask the `bible` program for the whole text and check that it is the text this recipe was made for."""
    output = subprocess.run(TEXT_COMMAND, check=True, capture_output=True, env={**os.environ, "LC_ALL": "C"}).stdout
    found = hashlib.sha256(output).hexdigest()
    if found != TEXT_SHA256:
        raise ValueError(f"the text of {' '.join(TEXT_COMMAND)!r} has SHA-256 {found}, expected {TEXT_SHA256}")
    return output.decode("ascii")


def parse_chapters(text: str) -> list[Chapter]:
    """Group lines such as `Ge1:1 In the beginning ...` into chapters, in the order of the text."""
    verses: dict[tuple[str, int], list[str]] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"(\S+?)(\d+):\d+ (.*)", line)
        if match is None:
            raise ValueError(f"not a verse: {line!r}")
        verses.setdefault((match[1], int(match[2])), []).append(match[3].strip())
    names = dict(zip(dict.fromkeys(short for short, _ in verses), BOOKS, strict=True))
    return [
        Chapter(names[short], f"{names[short]} {number}", tuple(lines)) for (short, number), lines in verses.items()
    ]


def is_held_out(chapter: Chapter) -> bool:
    if chapter.title in ALWAYS_TRAINED:
        return False
    return int(hashlib.sha256(chapter.title.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def render(chapter: Chapter, first: int = 0, heading: bool = True) -> str:
    """A chapter as people read it: prose flows, poetry keeps one verse a line, no verse numbers."""
    body = ("\n" if chapter.book in POETRY else " ").join(chapter.verses[first:])
    return f"{chapter.title}\n\n{body}" if heading else body


def document(chapter: Chapter, rng: random.Random) -> str:
    """One training view of a chapter; some lose the heading or begin later, so any opening may start a document."""
    kind = rng.random()
    if kind < 0.6:
        return BOS + render(chapter) + EOS
    first = 0 if kind < 0.8 else rng.randrange(len(chapter.verses))
    return BOS + render(chapter, first, heading=False) + EOS


class ChatWriter:
    """Makes question-and-answer documents out of the training verses."""

    def __init__(self, chapters: list[Chapter]):
        self.chapters = chapters
        counts = Counter(word for chapter in chapters for verse in chapter.verses for word in self._words(verse))
        self.topics = {
            word
            for word, count in counts.items()
            if count >= 5 and len(word) > 2 and (word[0].isupper() or count <= 600)
        }

    @staticmethod
    def _words(verse: str) -> list[str]:
        return re.findall(r"(?<=[a-z,;:] )[A-Za-z]+", verse)

    def write(self, rng: random.Random) -> str:
        turns = (self._turn(rng) for _ in range(rng.choice((1, 1, 2, 3))))
        return BOS + "".join(f"{USER}{ask}{END}{ASSISTANT}{answer}{END}" for ask, answer in turns) + EOS

    def _turn(self, rng: random.Random) -> tuple[str, str]:
        chapter = rng.choice(self.chapters)
        index = rng.randrange(len(chapter.verses))
        verse = chapter.verses[index]
        kind = rng.random()
        if kind < 0.08:
            return rng.choice(GREETINGS)
        if kind < 0.18:
            return rng.choice(REFERENCE_PROMPTS).format(f"{chapter.title}:{index + 1}"), verse
        if kind < 0.35 and index + 1 < len(chapter.verses):
            return rng.choice(NEXT_PROMPTS).format(verse), chapter.verses[index + 1]
        topics = [word for word in self._words(verse) if word in self.topics]
        if kind < 0.75 and topics:
            topic = rng.choice(topics)
            article = "the " if topic.islower() and rng.random() < 0.4 else ""
            return rng.choice(TOPIC_PROMPTS).format(article + topic), verse
        return self._continuation(chapter, index, rng)

    @staticmethod
    def _continuation(chapter: Chapter, index: int, rng: random.Random) -> tuple[str, str]:
        words = chapter.verses[index].split()
        cut = rng.randint(2, max(2, len(words) // 2))
        rest = [" ".join(words[cut:]), *chapter.verses[index + 1 : index + rng.randint(1, 3)]]
        return rng.choice(CONTINUE_PROMPTS).format(" ".join(words[:cut])), " ".join(rest).strip()
