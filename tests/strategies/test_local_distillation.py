"""Local gradient matching: each client's set follows from its own releases alone."""

import pytest
import reference
import torch
from conftest import private
from few_digits import CLASSES, NOTICE, SHAPE, SMALL, UNEQUAL, a_net, digits, few

from dpfl_lightning.algorithms.server_training import public_generator, torch_seed
from dpfl_lightning.errors import UserError
from dpfl_lightning.papers.distillation.distillation import Distillation
from dpfl_lightning.papers.distillation.local_distillation import LocalDistillation
from dpfl_lightning.papers.distilled_data import load_distilled

pytestmark = NOTICE
COUNTS = [*UNEQUAL[:2], [6, 7, 0]]


def matched(make_loop, **options):
    """A finished run of three clients, the last of which lacks a class, and its strategy."""
    more = {name: options.pop(name) for name in ("privacy", "rounds") if name in options}
    strategy = LocalDistillation(**{**SMALL, **options})
    loop = few(make_loop, strategy, counts=COUNTS, **{"rounds": 3, "evaluate_every": 3, **more})
    return loop, loop.run(), strategy


def condensation(population, client: int, rounds: int, reinit_every: int, epochs: int):
    """Condensation of one client's records by torch's optimisers, class by class: the images of its classes."""
    net, theta = a_net().net, a_net().flat
    generator = torch.Generator().manual_seed(torch_seed(public_generator(0, "images", client)))
    images = [one.requires_grad_() for one in torch.randn(CLASSES, 2, *SHAPE, generator=generator)]
    optimizers = [torch.optim.SGD([leaf], lr=0.1, momentum=0.5) for leaf in images]
    rows = population.train_of[client]
    real = {label: population.x[rows[population.y[rows] == label]] for label in range(CLASSES)}
    for round in range(1, rounds + 1):
        reference.condensation_round(net, theta, optimizers, images, {label: x for label, x in real.items() if len(x)})
        if round % reinit_every == 0:
            theta = a_net(seed=torch_seed(public_generator(0, "initialisation", round, client))).flat
        else:
            x, y = torch.cat([leaf.detach() for leaf in images]), torch.arange(CLASSES).repeat_interleave(2)
            seed = torch_seed(public_generator(0, "net", round, client))
            theta = reference.sgd_epochs(net, theta, x, y, epochs, 0.01, seed)
    return torch.cat([leaf.detach() for label, leaf in enumerate(images) if len(real[label])])


def test_each_client_has_the_set_of_its_own_records(make_loop):
    """A step of 0.1 for two images a class and 4 + 4 + 3 rows, and a new model after the second round."""
    loop, _, _ = matched(make_loop, image_learning_rate=5.5, reinit_every=2)
    alone = [condensation(digits(COUNTS), client, 3, reinit_every=2, epochs=2) for client in range(3)]
    union = load_distilled(loop.output_dir)
    torch.testing.assert_close(union.x, torch.cat(alone), rtol=1e-4, atol=1e-5)
    assert union.y.tolist() == [0, 0, 1, 1, 2, 2] * 2 + [0, 0, 1, 1]
    assert not torch.allclose(alone[0], alone[1], atol=0.01)


@pytest.mark.e2e
def test_clients_release_and_pay_what_they_do_for_one_set(make_loop):
    loop, result, _ = matched(make_loop, privacy=private())
    other = few(make_loop, Distillation(**SMALL), counts=COUNTS, privacy=private(), rounds=3, evaluate_every=3)
    assert result.guarantee.epsilon == other.run().guarantee.epsilon <= 8
    for client in range(3):
        assert loop.clients.budgets.ledger.events(client) == other.clients.budgets.ledger.events(client)
    assert len(load_distilled(loop.output_dir).y) == 3 * CLASSES * 2, "which classes a client holds is private"


@pytest.mark.e2e
def test_final_models_are_of_the_union_or_of_each_client(make_loop):
    union, result, _ = matched(make_loop)
    assert len(union.final_models(union.state).models) == 1 and result.test_accuracy is not None
    own, _, _ = matched(make_loop, final="own")
    models = own.final_models(own.state)
    assert len(models.models) == 3 and models.model_of == (0, 1, 2)
    assert not torch.equal(models.models[0], models.models[1])
    score = own.evaluated[3].test.accuracy
    assert 0 <= score <= 1


def test_no_gradient_is_averaged():
    with pytest.raises(UserError, match=r"`strategies.local_distillation.aggregation` must be sum, .* got 'median'"):
        LocalDistillation(aggregation="median")


@pytest.mark.e2e
def test_no_set_is_made_where_no_client_holds_enough_of_a_class(make_loop):
    with pytest.raises(UserError, match=r"local_distillation.min_records_per_target` must be so low .*got 500.*no set"):
        matched(make_loop, privacy=None, min_records_per_target=500)
