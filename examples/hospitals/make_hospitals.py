"""Five hospitals' CSV files as people find them, with synthetic numbers: `python make_hospitals.py --out raw --seed 0`.

80 to 20,000 admissions; patients with several; missing values; other column orders; F/M beside female/male; yes/no
beside 1/0; dates in two styles; one file with semicolons and decimal commas.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

SIZES = {"aarhus": 80, "bergen": 600, "cork": 2500, "dijon": 7000, "essen": 20000}
MISSING = {"crp": 0.12, "creatinine": 0.08, "sbp": 0.03, "sex": 0.01}

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="raw")
parser.add_argument("--seed", type=int, default=7)
args = parser.parse_args()
rng, out = np.random.default_rng(args.seed), Path(args.out)
out.mkdir(parents=True, exist_ok=True)

for k, (name, n) in enumerate(SIZES.items()):
    patients = np.repeat(np.arange(n), 1 + rng.poisson(0.6, n))[:n]  # 1.6 admissions each
    age = rng.normal(62 + 2 * k, 15, n).clip(18, 99).round()[patients]
    sex = rng.choice(["F", "M"], n)[patients]
    admission = rng.choice(["elective", "emergency", "transfer"], n, p=[0.5, 0.4, 0.1])
    crp, sbp = rng.lognormal(2.5, 1, n).round(1), rng.normal(130, 20, n).round()
    creatinine, los = rng.lognormal(0, 0.4, n).round(2), rng.gamma(2, 2, n).round(1)
    day = pd.to_datetime("2022-01-01") + pd.to_timedelta(rng.integers(0, 900, n), unit="D")
    z = -3.6 + 0.03 * (age - 62) + 0.45 * (np.log(crp) - 2.5) + 0.8 * (admission == "emergency") - 0.02 * (sbp - 130)
    died = rng.random(n) < 1 / (1 + np.exp(-(z + 0.75 * np.log(creatinine) + 0.15 * k)))
    table = pd.DataFrame(
        {
            "patient_id": [f"{name[:2]}{args.seed}-{i}" for i in patients],
            "admission_date": day.strftime("%d/%m/%Y" if name == "dijon" else "%Y-%m-%d"),
            "age": age,
            "sex": np.where(sex == "F", "female", "male") if name == "cork" else sex,
            "admission": admission,
            "crp": crp,
            "sbp": sbp,
            "creatinine": creatinine,
            "los": los,
            "died_30d": np.where(died, "yes", "no"),
        }
    )
    for column, share in MISSING.items():
        table.loc[rng.random(n) < share, column] = np.nan
    if name == "bergen":
        table = table[list(rng.permutation(table.columns))]
    if name == "dijon":
        table = table[list(reversed(table.columns))]
    if name == "essen":
        table["died_30d"] = table["died_30d"].map({"yes": 1, "no": 0})
    style = {"sep": ";", "decimal": ",", "na_rep": "?"} if name == "cork" else {}
    table.to_csv(out / f"{name}.csv", index=False, **style)
    print(name, n, "admissions", len(set(patients)), "patients", f"{died.mean():.1%} died")
