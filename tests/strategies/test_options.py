"""Options that are out of range: one sentence that names the key."""

import pytest

from dpfl_lightning import strategies
from dpfl_lightning.errors import UserError

#: strategy -> (option, value, what the sentence says, other options)
BAD = {
    "clustered": [
        ("num_clusters", 0, "`auto` or a whole number .* got 0"),
        ("num_clusters", "four", "`auto` or a whole number .* got 'four'"),
        ("num_clusters", True, "a whole number or text, got True"),
        ("mixture", "papre", "one of robust, paper.*Did you mean `paper`"),
        ("first_round_noise_multiplier", 0, "a number above 0, `same` or"),
        ("first_round_noise_multiplier", "auto", ".* got 'auto'"),
        ("reuse_first_round", "no", "true or false, got 'no'"),
        ("switch_round", 0, "`auto` or a whole number"),
        ("selection", "loss", "one of .*server_similarity"),
        ("selection_epsilon", 0.1, r"not be set .* server_similarity.* 0\.1", {"selection": "server_similarity"}),
        ("selection_epsilon", 0.1, r"not be set with .* paper_argmin.* got 0\.1", {"selection": "paper_argmin"}),
    ],
    "ifca": [
        ("num_clusters", 0, ">= 1, got 0"),
        ("init", "distinkt", "one of .* Did you mean `distinct`"),
        ("selection", "argmin", "one of"),
        ("selection", "exponential_frosen", "one of .* you mean `exponential_frozen`"),
        ("selection_epsilon", "much", "a number or null"),
        ("selection_epsilon", 0.0, "above 0 and finite, got 0.0"),
        ("selection_epsilon", float("inf"), "above 0"),
        ("selection_epsilon", 0.1, "not be set with", {"selection": "paper_argmin"}),
        ("selection_rounds", 0, ">= 1, got 0"),
        ("selection_rounds", 3, "not be set with", {"selection": "exponential"}),
        ("loss_bound", -1.0, "above 0"),
        ("loss_bound", 1.0, "not be set with", {"selection": "paper_argmin"}),
    ],
    "kmeans_clusters": [("num_clusters", 0, ">= 1")],
    "mr_mtl": [("pull", -1, ">= 0")],
    "noise_aware": [("max_influence", 0.0, r"in \(0, 1\]"), ("noise", "guessed", "one of")],
    "robust_hdp": [
        ("estimator", "rpac", "one of .*Did you mean `rpca`"),
        ("preset", "fats", "one of .*Did you mean `fast`"),
        ("reestimate_every", -1, "a number of rounds"),
        ("reestimate_every", 1.5, r"a whole number or text, got 1\.5"),
        ("reestimate_every", True, ""),
        ("reestimate_every", "never", ".* got 'never'"),
        ("floor", -1.0, ">= 0"),
        ("max_weight", 0.0, r"in \(0, 1\]"),
        ("rows", 0, "at least 1"),
        ("rows", "many", "a whole number or null, got 'many'"),
        ("row_choice", "tail", "one of random, head"),
        ("rank", 2, "1 unless the estimator is hetero_pca"),
    ],
    "pfa": [
        ("variant", "liu", ".*liu_code"),
        ("grouping", "mix", ".*mixture"),
        ("components", 0, ">= 1"),
        ("top_fraction", 1.0, r"in \(0, 1\)"),
    ],
    "fedadam": [("beta1", 1.0, "")],
    "fedyogi": [("epsilon", 0.0, "")],
    "server_momentum": [("momentum", -0.1, "")],
    "multi_krum": [("share", 0.5, r"in \[0, 0.5\)")],
    "noise_floor": [("false_alarm", 0.0, r"in \(0, 1\)")],
    "norm_bound": [("factor", 0.0, "above 0")],
    "trimmed_mean": [("share", 0.5, "")],
    "biased_selection": [("dissimilarity", value, r"in \[0, 1e6\]") for value in (-1.0, 1e308)],
    "two_stage_selection": [
        ("warmup_rounds", 1, ">= 2, got 1"),
        ("ratio", -1.0, r"in \[0, 1e6\]"),
        ("ratio", 1e308, r"in \[0, 1e6\], got 1e\+308"),
        ("ratio", None, "a number with shrunken estimates"),
        ("loss_share", 1.0, r"in \(0, 1\)"),
        ("loss_bound", 1e-300, r"in \[1e-6, 1e6\], got 1e-300"),
        ("estimates", "minimum", "one of shrunken, least_difference"),
        ("allow_unsound", True, "false with shrunken estimates"),
    ],
    "distillation": [
        ("mode", "paper", "one of default, paper_literal, got 'paper'"),
        ("matching", "cosine", "one of .* got 'cosine'. Did you mean `cos`"),
        ("aggregation", "medium", ".*Did you mean `median`"),
        ("images_per_class", 0, ">= 1, got 0"),
        ("image_learning_rate", 0.0, "above 0"),
        ("image_momentum", 1.0, r"in \[0, 1\)"),
        ("participation_fraction", 0.0, r"in \(0, 1\]"),
        ("row_weights", "noise_aware", "equal unless", {"matching": "mse"}),
        ("row_weights", "noise_aware", "equal unless", {"aggregation": "median"}),
        ("reinit_every", -1, ">= 0"),
    ],
    "feature_means": [
        ("images_per_class", 0, ">= 1, got 0"),
        ("nets", 0, ">= 1"),
        ("image_learning_rate", 0.0, r"in \(0, 10\]"),
        ("image_learning_rate", 1e37, r"in \(0, 10\], got 1e\+37"),
        ("evaluation_epochs", 0, ">= 1"),
    ],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_one_sentence(name):
    for option, value, words, *others in BAD[name]:
        options = {option: value, **(others[0] if others else {})}
        if name == "two_stage_selection":
            options = {"clients_per_round": 3, "warmup_rounds": 4, **options}
        with pytest.raises(UserError, match=rf"^`strategies\.{name}\.{option}` must .*{words}"):
            strategies.build({name: options})
