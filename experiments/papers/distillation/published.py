"""The centralised method at its papers' own scale, beside what these papers published."""

from __future__ import annotations

from typing import Any

from experiments.papers.distillation.accuracy import TEST
from experiments.papers.distillation.paper import PUBLISHED as NUMBERS
from experiments.papers.distillation.references import SET_ASIDE, TUNED
from experiments.papers.distillation.settings import DISTILLED, as_words, distillation, population
from experiments.papers.experiment import Column, Comparison, Experiment, Row, Training

INITIALISATIONS = 1000
TUNED_ROUNDS = 40
#: images a class -> learning rate of the images. The tuned one is for width 32 and 10 images. Here the distance adds up
#: four times as many rows, and the gradient is a mean over other numbers of images: a quarter, times images / 10, or so
TUNED_RATES = {1: 0.075, 10: 0.75, 50: 3.0}
#: row -> options of the strategy
_OPTIONS: dict[str, dict[str, Any]] = {"dc": {}, "dsa": {"augmentation": "dsa"}, "tuned": TUNED}


def _words(row: str, column: str, scale: str) -> list[str]:
    images = int(column.removeprefix("ipc"))
    tuned = row == "tuned"
    # from one initialisation to the next there are as many rounds as images a class
    rounds = TUNED_ROUNDS if tuned else INITIALISATIONS * images
    options = _OPTIONS[row] | ({"image_learning_rate": TUNED_RATES[images]} if tuned else {})
    own = distillation(scale, 1, images_per_class=images, **options)
    own |= {"rounds": rounds, "evaluation.every": max(20, rounds // 5)}
    return as_words({**population("fashion_mnist", 1, 1.0), **(SET_ASIDE if tuned else {}), **own})


PUBLISHED = Experiment(
    name="distillation.published",
    title="The centralised method at its papers' scale, Fashion-MNIST",
    shows=TEST,
    rows={
        "dc": Row("gradient matching", "test_accuracy"),
        "dsa": Row("gradient matching with DSA", "test_accuracy"),
        "tuned": Row(f"gradient matching, {TUNED_ROUNDS} rounds, image steps tuned on public records", "test_accuracy"),
    },
    columns={f"ipc{images}": Column(f"{images} a class") for images in (1, 10, 50)},
    cells=dict.fromkeys(_OPTIONS, Training(_words, study=DISTILLED)),
    scales={
        "paper": f"{INITIALISATIONS:,} initialisations of 1, 10 or 50 rounds, ConvNet of width 128, 256 records a class"
    },
    paper=NUMBERS,
    comparison=Comparison(3.0, better="higher"),
    minutes={"paper": 120},
    notes=(
        "The paper's numbers are those of Zhao, Mopuri and Bilen (2021), and with DSA of Zhao and Bilen (2021): means "
        "of 20 nets on each of five sets.",
        "At 10 images a class there are ten times as many rounds as at 1, at 50 fifty times.",
        "Image steps are tuned at width 32 and 10 images a class (distillation.tuning). Here their learning rate is "
        "0.075, 0.75 and 3 at 1, 10 and 50 images a class, for the distance adds up four times as many rows, and the "
        f"gradient is a mean over images. {TUNED_ROUNDS} rounds on 48,000 records; no paper has that row.",
    ),
)
