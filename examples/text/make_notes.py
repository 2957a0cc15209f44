"""Made-up triage notes of four hospitals in the folder ``notes``: free text, the age, and where the patient was sent.

No note is anybody's. What makes them hard is what makes real ones hard: complaints that several departments see,
things that a patient does not have (``denies chest pain``), words that say nothing, slips of the pen, wrong labels.
"""

import csv
from pathlib import Path

import numpy as np

RECORDS = {"east": 3000, "north": 2500, "south": 2000, "west": 1500}
WRONG, SLIPS, BLANK = 0.04, 0.03, 0.01
"""Shares of wrong labels, of words with a slip of the pen, and of notes that nobody wrote."""

COMPLAINTS = {
    "cardiology": (
        "crushing chest pain", "palpitations", "pain radiating to left arm", "swollen ankles", "irregular pulse",
        "chest tightness on exertion", "short of breath lying flat", "known angina", "fainted while climbing stairs",
    ),
    "pneumology": (
        "productive cough", "wheezing", "short of breath at rest", "known asthma", "coughing up blood",
        "chest pain when breathing in", "inhaler without effect", "smoker with COPD", "low oxygen saturation",
    ),
    "surgery": (
        "fell from ladder", "deep cut to the hand", "swollen ankle after a fall", "deformed wrist", "open wound",
        "cannot put weight on left leg", "struck on the head", "dislocated shoulder", "pain in right lower abdomen",
    ),
    "gastroenterology": (
        "vomiting since last night", "bloody stools", "cramps in upper abdomen", "diarrhoea", "heartburn after meals",
        "pain in right lower abdomen", "yellow skin", "no appetite", "known gallstones",
    ),
    "neurology": (
        "sudden weakness of left arm", "slurred speech", "worst headache ever", "seizure witnessed", "double vision",
        "numb face", "fainted without warning", "dizzy and unsteady", "confused since this morning",
    ),
}  # fmt: skip
CLASSES = tuple(COMPLAINTS)

OPENINGS = ("brought in by ambulance", "walked in", "referred by GP", "came with family", "sent from nursing home")
DENIED = ("denies", "no", "without", "no sign of")
ONSET = ("since this morning", "for three days", "for about two weeks", "started one hour ago", "getting worse")
VITALS = ("BP {}/{}", "pulse {1}", "temp 36.{2}", "temp 38.{2}", "sats 9{2} percent", "GCS 15", "pain score {2}/10")
FILLER = (
    "patient anxious", "bloods taken", "ECG done", "waiting for doctor", "allergic to penicillin", "family informed",
    "history of diabetes", "takes blood thinners", "lives alone", "speaks little English", "vitals stable",
    "seen before",
)  # fmt: skip


def slip(word: str, random: np.random.Generator) -> str:
    """A word with two letters exchanged, now and then."""
    if len(word) < 4 or random.random() > SLIPS:
        return word
    at = int(random.integers(1, len(word) - 2))
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def note(kind: str, random: np.random.Generator) -> str:
    """One note: complaints, mostly of this department, things denied, vitals, and what is always written."""

    def some(listed: tuple[str, ...], count: int) -> list[str]:
        return [listed[k] for k in random.permutation(len(listed))[:count]]

    others = [one for one in CLASSES if one != kind]
    complaints = some(COMPLAINTS[kind], int(random.integers(1, 4)))
    if random.random() < 0.35:
        complaints += some(COMPLAINTS[others[int(random.integers(4))]], 1)
    denied = [
        f"{some(DENIED, 1)[0]} {some(COMPLAINTS[others[int(random.integers(4))]], 1)[0]}"
        for _ in range(int(random.integers(0, 3)))
    ]
    numbers = random.integers(90, 180), random.integers(50, 120), random.integers(0, 9)
    vitals = [one.format(*numbers) for one in some(VITALS, 2)]
    parts = [*complaints, *denied, *vitals, *some(ONSET, 1), *some(FILLER, int(random.integers(1, 4)))]
    parts = [parts[k] for k in random.permutation(len(parts))]
    text = f"{some(OPENINGS, 1)[0]}, {', '.join(parts[:-1])}. {parts[-1]}."
    return " ".join(slip(word, random) for word in text.split())


def rows(hospital: int, count: int) -> list[list[str]]:
    """One hospital's records: the note, the age, the department. Hospitals see departments in different shares."""
    random = np.random.default_rng([2026, hospital])
    shares = random.dirichlet(np.full(len(CLASSES), 5.0))
    made = []
    for _ in range(count):
        kind = CLASSES[int(random.choice(len(CLASSES), p=shares))]
        age = int(np.clip(random.normal(35 if kind == "surgery" else 60, 18), 1, 100))
        text = note(kind, random) if random.random() > BLANK else ""
        sent = CLASSES[int(random.integers(len(CLASSES)))] if random.random() < WRONG else kind
        made.append([text, str(age), sent])
    return made


def write(folder: Path, share: float = 1.0) -> None:
    """Write the four files, or a share of each, and one of new notes that nobody has sent anywhere yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for k, (name, count) in enumerate(RECORDS.items()):
        with open(folder / f"{name}.csv", "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([["note", "age", "department"], *rows(k, int(count * share))])
    with open(folder.parent / "new-notes.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["note", "age"], *(row[:2] for row in rows(9, 20))])


if __name__ == "__main__":
    write(Path("notes"))
