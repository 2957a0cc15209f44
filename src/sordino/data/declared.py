"""Public constants of the standard tables: column ranges and category lists, declared once and for all.

Ranges are round numbers wide enough for what the column measures; categories are those of the data sets' own
documentation. A cell outside a range is clipped to it, a category that is not listed becomes "other".
"""

from __future__ import annotations

from typing import Any

_YES_NO = ["no", "yes"]

BANK_MARKETING: dict[str, Any] = {
    "target": "y",
    "classes": _YES_NO,
    "delimiter": ";",
    "numeric": {
        "age": [18, 100],
        "balance": [-10_000, 100_000],
        "day": [1, 31],
        "duration": [0, 5_000, "log"],
        "campaign": [1, 64, "log"],
        "pdays": [-1, 1_000],
        "previous": [0, 300, "log"],
    },
    "categorical": {
        "job": [
            "admin.", "blue-collar", "entrepreneur", "housemaid", "management", "retired", "self-employed", "services",
            "student", "technician", "unemployed", "unknown",
        ],
        "marital": ["divorced", "married", "single"],
        "education": ["primary", "secondary", "tertiary", "unknown"],
        "default": _YES_NO,
        "housing": _YES_NO,
        "loan": _YES_NO,
        "contact": ["cellular", "telephone", "unknown"],
        "month": ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"],
        "poutcome": ["failure", "other", "success", "unknown"],
    },
}  # fmt: skip

ADULT_COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship", "race",
    "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income",
)  # fmt: skip

ADULT: dict[str, Any] = {
    "target": "income",
    "classes": ["<=50K", ">50K"],
    "numeric": {
        "age": [17, 90],
        "fnlwgt": [0, 1_500_000],
        "education-num": [1, 16],
        "capital-gain": [0, 100_000, "log"],
        "capital-loss": [0, 5_000, "log"],
        "hours-per-week": [0, 100],
    },
    "categorical": {
        "workclass": [
            "Private", "Self-emp-not-inc", "Self-emp-inc", "Federal-gov", "Local-gov", "State-gov", "Without-pay",
            "Never-worked",
        ],
        "education": [
            "Bachelors", "Some-college", "11th", "HS-grad", "Prof-school", "Assoc-acdm", "Assoc-voc", "9th", "7th-8th",
            "12th", "Masters", "1st-4th", "10th", "Doctorate", "5th-6th", "Preschool",
        ],
        "marital-status": [
            "Married-civ-spouse", "Divorced", "Never-married", "Separated", "Widowed", "Married-spouse-absent",
            "Married-AF-spouse",
        ],
        "occupation": [
            "Tech-support", "Craft-repair", "Other-service", "Sales", "Exec-managerial", "Prof-specialty",
            "Handlers-cleaners", "Machine-op-inspct", "Adm-clerical", "Farming-fishing", "Transport-moving",
            "Priv-house-serv", "Protective-serv", "Armed-Forces",
        ],
        "relationship": ["Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried"],
        "race": ["White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black"],
        "sex": ["Female", "Male"],
        "native-country": [
            "United-States", "Cambodia", "England", "Puerto-Rico", "Canada", "Germany", "Outlying-US(Guam-USVI-etc)",
            "India", "Japan", "Greece", "South", "China", "Cuba", "Iran", "Honduras", "Philippines", "Italy", "Poland",
            "Jamaica", "Vietnam", "Mexico", "Portugal", "Ireland", "France", "Dominican-Republic", "Laos", "Ecuador",
            "Taiwan", "Haiti", "Columbia", "Hungary", "Guatemala", "Nicaragua", "Scotland", "Thailand", "Yugoslavia",
            "El-Salvador", "Trinadad&Tobago", "Peru", "Hong", "Holand-Netherlands",
        ],
    },
}  # fmt: skip

# Breast cancer, Wisconsin diagnostic: ten measurements of a cell nucleus (radius in pixels, …), each as the mean over
# the image, its standard error, and the mean of the three largest.
_NUCLEUS = {
    "radius": (40, 4), "texture": (50, 6), "perimeter": (260, 30), "area": (4_500, 600), "smoothness": (0.25, 0.04),
    "compactness": (1.2, 0.15), "concavity": (1.4, 0.4), "concave points": (0.3, 0.06), "symmetry": (0.7, 0.1),
    "fractal dimension": (0.25, 0.04),
}  # fmt: skip

BREAST_CANCER: dict[str, Any] = {
    "target": "diagnosis",
    "classes": [0, 1],
    "numeric": {
        **{f"mean {name}": [0, top] for name, (top, _) in _NUCLEUS.items()},
        **{f"{name} error": [0, top] for name, (_, top) in _NUCLEUS.items()},
        **{f"worst {name}": [0, top] for name, (top, _) in _NUCLEUS.items()},
    },
}
