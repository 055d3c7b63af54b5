"""Hospitals whose patients have up to four admissions each, with synthetic numbers."""

import numpy as np
import pandas

from dpfl_lightning import Population

MOST = 4  # admissions of a patient


def hospitals(patients: int = 600) -> Population:
    """Return five hospitals with `patients` each; a fifth of the patients is held out."""
    rng = np.random.default_rng(0)
    tables = {}
    for shift, name in enumerate(("aarhus", "bergen", "cork", "dijon", "essen")):
        rows = np.minimum(1 + rng.poisson(1.5, patients), MOST)
        of = np.repeat(np.arange(patients), rows)
        age = rng.normal(62 + 2 * shift, 15, patients)[of]
        crp, pressure, creatinine = (rng.normal(size=(3, patients))[:, of] + rng.normal(0, 0.5, (3, len(of)))).tolist()
        risk = 0.06 * (age - 66) + np.array(crp) - np.array(pressure) + 0.5 * np.array(creatinine)
        tables[name] = pandas.DataFrame(
            {"patient_id": of, "age": age, "crp": crp, "pressure": pressure, "creatinine": creatinine}
        ).assign(ill=(rng.random(len(of)) < 1 / (1 + np.exp(-risk))).astype(int))
    return Population.from_dataframe(
        tables, person="patient_id", label="ill", num_classes=2, columns={"age": {"scale": (62, 15)}}, held_out=0.2
    )
