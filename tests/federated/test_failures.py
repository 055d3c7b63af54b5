"""Clients that fail after they were charged: they are left out of the round, and the others go on."""

import itertools
import os
import stat

import pytest
import torch
from conftest import EVERY_ENGINE, PowerCut
from fakes import Recorder

from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client.engines import one_batch
from dpfl_lightning.federated.client.engines.serial import SerialEngine
from dpfl_lightning.federated.server import aggregate
from dpfl_lightning.papers.baselines.ifca import Ifca
from dpfl_lightning.privacy.ledger.ledger import read_ledger

PROTECTED = PrivacyOptions(epsilon=8.0, delta=1e-3)


@pytest.fixture
def failing(monkeypatch):
    """`failing(round, clients, error)`: the work of these clients raises the error in that round."""

    def fail(round, clients, error):
        local_task = SerialEngine.local_task

        def broken(self, client, request, *args):
            if request.round == round and client.number in clients:
                raise error
            return local_task(self, client, request, *args)

        monkeypatch.setattr(SerialEngine, "local_task", broken)

    return fail


def without(loop, round, clients):
    """Like the loop, over a network that loses the updates of these clients in that round."""
    loop.traffic.lost = lambda plan: frozenset(clients) if plan.round == round else frozenset()
    return loop


ONE_STEP = {"clients": ClientOptions(count=4, batch_size=None, learning_rate=0.3)}  # in one batch


WAYS = [([], {"rounds": 2}), ([Recorder(updates=True)], {**ONE_STEP, "rounds": 2})]


@pytest.mark.e2e
@pytest.mark.parametrize("parts, options", WAYS, ids=["streamed", "single updates of a batch"])
@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_a_client_that_fails_is_left_out_and_the_round_goes_on(engine, options, parts, make_loop, failing):
    expected = without(make_loop(engine=ENGINES[engine](), parts=parts, **options), 2, {1})
    expected.run()
    failing(2, {1}, MemoryError("of record 17"))
    loop = make_loop(engine=ENGINES[engine](), parts=parts, **options)
    words = r"^round 2: clients failed, and are left out of it: 1 \(MemoryError\); they have paid"
    with pytest.warns(UserNotice, match=words) as warned:
        assert loop.run().finished
    [notice] = [str(warning.message) for warning in warned if warning.category is UserNotice]
    assert "record 17" not in notice
    torch.testing.assert_close(loop.state.models, expected.state.models, rtol=1e-5, atol=1e-5)
    assert read_ledger(loop.clients.folder.ledger_file) == read_ledger(expected.clients.folder.ledger_file)
    log = loop.output_dir / "errors.log"
    assert "MemoryError: of record 17" in log.read_text() and stat.S_IMODE(os.stat(log).st_mode) == 0o600


def test_a_failed_batch_does_not_change_the_bits_of_a_client(make_loop, failing):
    """Its clients are trained alone, as by the reference."""
    failing(2, {1}, ValueError())
    models = []
    for engine in ("serial", "fast"):
        loop = make_loop(engine=ENGINES[engine](), **ONE_STEP)
        with pytest.warns(UserNotice, match="ValueError"):
            loop.run()
        models.append(loop.state.models)
        counts = loop.clients.engine.clients.counts[:, 0].tolist()
        sizes = loop.population.num_records
        assert counts == [3 * sizes[0], 2 * sizes[1], 3 * sizes[2], 3 * sizes[3]], "no gradient is counted twice"
    torch.testing.assert_close(*models, rtol=1e-6, atol=1e-6)


def test_one_error_of_a_client_that_is_alone_in_its_batch_leaves_it_out(make_loop, monkeypatch):
    local_task, failed = SerialEngine.local_task, []

    def broken_once(self, client, *args):
        if client.number == 1 and not failed:
            failed.append(client)
            raise OSError("a disk, once")
        return local_task(self, client, *args)

    monkeypatch.setattr(SerialEngine, "local_task", broken_once)
    monkeypatch.setattr(one_batch, "MOST_CLIENTS", 1)
    with pytest.warns(UserNotice, match=r"round 1: clients failed.*: 1 \(OSError\)"):
        assert make_loop(engine=ENGINES["fast"](), **ONE_STEP).run().finished


def test_an_error_of_a_batch_that_is_of_no_client_ends_the_run(make_loop, monkeypatch):
    def broken(*args):
        raise IndexError("of the batch")

    monkeypatch.setattr(one_batch, "dp_step", broken)
    with pytest.raises(IndexError, match="of the batch"):
        make_loop(engine=ENGINES["fast"](), **ONE_STEP).run()


@pytest.mark.parametrize("engine", ["serial", "fast"])
def test_an_error_of_all_clients_ends_the_run_before_the_next_charge(engine, make_loop, failing):
    failing(2, range(4), ZeroDivisionError("in my net"))
    loop = make_loop(engine=ENGINES[engine](), privacy=PROTECTED)
    with pytest.raises(ZeroDivisionError, match="in my net") as error:
        loop.run()
    assert "broken" in [entry.name for entry in error.traceback], "the traceback leads to its cause"
    assert "Every client of round 2 failed." in error.value.__notes__
    assert {charge.round for charge in read_ledger(loop.clients.folder.ledger_file)} == {1, 2}


@pytest.mark.parametrize("engine, options", [("serial", {}), ("fast", ONE_STEP)])
def test_what_the_privacy_core_refuses_ends_the_run(engine, options, make_loop, failing):
    failing(2, {1}, UserError("`batch` must have fewer records"))
    with pytest.raises(UserError, match="fewer records"):
        make_loop(engine=ENGINES[engine](), **options).run()


@pytest.mark.e2e
@pytest.mark.parametrize("engine", ["serial", "fast"])
def test_a_client_that_fails_to_answer_is_left_out(engine, make_loop, monkeypatch):
    answer = SerialEngine.answer

    def broken(self, client, query, round, number):
        if client.number == 2 and round == 1:
            raise OSError("a disk")
        return answer(self, client, query, round, number)

    monkeypatch.setattr(SerialEngine, "answer", broken)
    loop = make_loop(engine=ENGINES[engine](), parts=[Ifca()], privacy=PROTECTED)
    with pytest.warns(UserNotice, match=r"round 1: clients failed.*: 2 \(OSError\)"):
        assert loop.run().finished


@pytest.mark.e2e
def test_who_was_lost_stays_lost_when_the_round_is_repeated(make_loop, failing, monkeypatch):
    """Broken off between the training and the end of the round: the resumed run has the bits of the unbroken one."""

    unbroken, broken = (make_loop(parts=[Recorder(updates=True)]) for _ in range(2))
    combine, rounds = aggregate.combine, itertools.count(1)

    def cut(*args):
        if next(rounds) == 2:
            raise PowerCut
        return combine(*args)

    failing(2, {1}, MemoryError())
    with pytest.warns(UserNotice, match="MemoryError"):
        unbroken.run()
        monkeypatch.setattr(aggregate, "combine", cut)
        with pytest.raises(PowerCut):
            broken.run()
    monkeypatch.undo()  # it does not fail again
    resumed = make_loop(parts=[Recorder(updates=True)], output_dir=broken.output_dir)
    resumed.run(resume=True)
    assert torch.equal(resumed.state.models, unbroken.state.models)
