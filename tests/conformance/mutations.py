"""Faults that the tests of other projects must find in our code: one change each, and the tests to run with it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from pytest import MonkeyPatch

from dpfl_lightning.auditing import bounds
from dpfl_lightning.privacy import noise, sampling
from dpfl_lightning.privacy.accounting import accountant, gaussian, rdp, schedule
from dpfl_lightning.privacy.clipping import gradient_sums, layer_rules, reference


@dataclass(frozen=True)
class Mutation:
    """`apply` breaks our code; `tests` (an expression of pytest's -k) of this file must find it."""

    file: str
    tests: str
    apply: Callable[[MonkeyPatch], None]


def scaled(owner: object, name: str, factor: float) -> Callable[[MonkeyPatch], None]:
    """Return a change that multiplies the result of a function or method."""
    real = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *args, **more: factor * real(*args, **more))


def less_noise(patch: MonkeyPatch) -> None:
    real = schedule._certified
    patch.setattr(schedule, "_certified", lambda *args: [0.9 * one for one in real(*args)])


def small_exact_epsilon(patch: MonkeyPatch) -> None:
    real = gaussian.gaussian_delta
    patch.setattr(gaussian, "gaussian_delta", lambda epsilon, mu: real(1.01 * epsilon, mu))


def first_records(patch: MonkeyPatch) -> None:
    rows = lambda records, rate, generator: np.arange(round(rate * records))  # noqa: E731
    patch.setattr(sampling, "poisson_rows", rows)


def double_records(patch: MonkeyPatch) -> None:
    real = reference.record_gradients

    def doubled(loss):
        gradients = real(loss)
        return lambda *args: {name: 2 * one for name, one in gradients(*args).items()}

    patch.setattr(reference, "record_gradients", doubled)


def next_counter(patch: MonkeyPatch) -> None:
    make = noise.modes.CTR
    patch.setattr(noise.modes, "CTR", lambda start: make((int.from_bytes(start, "big") + 1).to_bytes(16, "big")))


def swapped_bytes(patch: MonkeyPatch) -> None:
    real = noise.RandomGenerator.words
    patch.setattr(noise.RandomGenerator, "words", lambda self, count: real(self, count).byteswap())


def narrow_rates(patch: MonkeyPatch) -> None:
    real = bounds.rate_interval
    patch.setattr(bounds, "rate_interval", lambda hits, trials, significance: real(hits, trials, 2 * significance))


def lost_scores(patch: MonkeyPatch) -> None:
    from optuna.storages import RDBStorage

    patch.setattr(RDBStorage, "set_trial_user_attr", lambda self, trial_id, key, value: None)


def outside_of_range(patch: MonkeyPatch) -> None:
    from optuna.samplers import RandomSampler

    patch.setattr(RandomSampler, "sample_independent", lambda self, study, trial, name, values: values.high + 1)


DP, GRADIENTS, ACCOUNTING = "test_dp_accounting.py", "test_opacus_gradients.py", "test_opacus_accounting.py"
MUTATIONS = {
    "epsilon 10 % too small": Mutation(DP, "gaussian_basic", scaled(accountant.Accountant, "epsilon", 0.9)),
    "RDP of a step 1 % too small": Mutation(DP, "log_a_equals", scaled(rdp, "sampled_gaussian_rdp", 0.99)),
    "exact Gaussian epsilon 1 % too small": Mutation(DP, "gaussian_pld", small_exact_epsilon),
    "noise 10 % below the calibrated one": Mutation(DP, "SmallestNoise or inversion", less_noise),
    "epsilon of Opacus' steps 10 % too small": Mutation(
        ACCOUNTING, "rdp_accountant or prv_accountant", scaled(accountant.Accountant, "epsilon", 0.9)
    ),
    "noise multiplier 10 % too small": Mutation(ACCOUNTING, "noise_multiplier", less_noise),
    "batches of the first records": Mutation(ACCOUNTING, "Poisson", first_records),
    "norms of all rules halved": Mutation(GRADIENTS, "Linear", scaled(gradient_sums.ChunkGradients, "norms", 0.5)),
    "norms of an embedding halved": Mutation(GRADIENTS, "EmbeddingNorms", scaled(layer_rules.Lookup, "norms", 0.5)),
    "gradients of the reference doubled": Mutation(GRADIENTS, "RNN", double_records),
    "clip factors 1 % too large": Mutation(GRADIENTS, "SequenceBias", scaled(reference, "clip_factors", 1.01)),
    "the counter begins at 1": Mutation("test_cipher.py", "", next_counter),
    "bytes of a word reversed": Mutation("test_cipher.py", "", swapped_bytes),
    "error rates at twice the significance": Mutation("test_jax_privacy.py", "explicit or upper", narrow_rates),
    "p-value of one run halved": Mutation("test_jax_privacy.py", "p_value", scaled(bounds, "one_run_p_value", 0.5)),
    "a storage that loses attributes": Mutation("test_optuna.py", "user_attr", lost_scores),
    "a sampler that leaves its range": Mutation("test_optuna.py", "random and float", outside_of_range),
}
