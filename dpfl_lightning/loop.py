"""A whole run in this process: the only module that connects the server to its clients."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lightning.pytorch.loggers import Logger
from torch import nn

from dpfl_lightning import strategies
from dpfl_lightning.build import ENGINES, build_engine, build_module, build_net, build_population
from dpfl_lightning.config.mapping import from_mapping, options_file
from dpfl_lightning.config.options import ClientOptions, NetworkOptions, Options, PrivacyOptions
from dpfl_lightning.config.public import published_data
from dpfl_lightning.config.registry import build_object
from dpfl_lightning.config.yaml_text import read_yaml
from dpfl_lightning.data import Population
from dpfl_lightning.errors import require, require_one_of, require_whole, warn_user
from dpfl_lightning.federated.client.engines.engine import Engine
from dpfl_lightning.federated.client.engines.fast import FastEngine
from dpfl_lightning.federated.client.folder import ClientFolder
from dpfl_lightning.federated.client.identity import deciding_options
from dpfl_lightning.federated.client.local_clients import LocalClients, facts_of
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.clients import Clients
from dpfl_lightning.federated.messages.facts import Facts
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.folder import RunFolder
from dpfl_lightning.federated.server.results import RunResult
from dpfl_lightning.federated.server.run import read_result
from dpfl_lightning.federated.server.session import RunSession
from dpfl_lightning.federated.server.settings import RunConfig, client_settings, reported_epsilons
from dpfl_lightning.federated.server.strategy import Strategy, overrides, register
from dpfl_lightning.federated.transport.ranked import RankChannel
from dpfl_lightning.federated.transport.ranks import Ranks
from dpfl_lightning.federated.transport.threads import Threads
from dpfl_lightning.models.learning_rates import build_schedule
from dpfl_lightning.models.optimizers import build_optimizer
from dpfl_lightning.privacy.accounting.guarantee import ENDS_BY_RESULTS, EXACT_TIMES
from dpfl_lightning.privacy.accounting.units import Unit, unit_of
from dpfl_lightning.privacy.ledger.ledger import check_same
from dpfl_lightning.reporting.curves import Curves
from dpfl_lightning.reporting.guarantee_page import GuaranteePage
from dpfl_lightning.runtime.launcher import invocation
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted

if TYPE_CHECKING:
    from dpfl_lightning.federated.client.fairness import FairnessMeasure


class Remote(Protocol):
    """Clients whose records are not in this process; see `sites.server.deploy.AtSites`."""

    def facts(self, test: Population) -> Facts:
        """What the server knows of them; `test` has the test set alone, in the form of their records."""

    def clients(self, test: Population, module: ClientModule, privacy: PrivacyOptions | None) -> Clients:
        """The clients of a run."""


def build_loggers(options: Options) -> list[Logger]:
    """Make the Lightning loggers of `tracking.loggers`; those that take `save_dir` write to `output_dir`."""
    loggers: list[Logger] = []
    usual = {"save_dir": options.output_dir, "default_hp_metric": False}  # TensorBoard would chart an hp_metric of -1
    for place, one in enumerate(() if options.tracking is None else options.tracking.loggers):
        loggers.append(build_object(f"tracking.loggers.{place}", one, Logger, **usual))  # type: ignore[type-abstract]
    return loggers


def new_folder() -> str:
    """Return the folder of a new run that has no `output_dir`."""
    return datetime.now().strftime("runs/%Y-%m-%d_%H-%M-%S-%f")


class FederatedLoop(RunSession):
    """Differentially private federated training of one module over a population, with both sides in this process.

    Args:
        population: the clients' private records, and the records for evaluation.
        module: one client's step, or an `nn.Module` or LightningModule, which `ClientModule` wraps. Its parameters are
            the initial model, and after `run`, also after an interruption, the trained one, as in `model.safetensors`.
            If there are several models, `client_model` returns each client's; the module has their mean if every client
            has its own, and the initial parameters if clusters have theirs. Personal parameters always keep their
            initial values, and the module its mode.
        privacy: None is a run without privacy.
        strategies: at most one is an aggregation rule. Without one a strategy's `default_base` is added, or DPFedAvg.
        callbacks: nothing is printed without `Progress()`, as in `callbacks=[Progress()]`. Strategies may be here, too.
        engine: fast (the default), serial or trainer.
        output_dir: a new or empty folder; the default is a folder under `runs/`.
        device: "auto", or an accelerator of Lightning Fabric.
        fairness: see `evaluation.fairness`; in simulations alone.
        options: the resolved configuration, which is stored with the run.
        new_net: builds the module's `net` from a seed, for strategies that start with several models or begin again.
        remote: the clients, if their records are at sites; then the population has no client, but may have a test set.

    The other arguments are options of `config.options`.

    **Guarantees** Every release is planned, charged to the synced ledger, and noised, in this order; no client exceeds
    its schedule. `run(resume=True)` charges the round that a crash interrupted again, from `reserve_rounds`, with fresh
    noise; with `privacy.noise_key` (a simulation) it repeats the uninterrupted run bit for bit on a CPU, except for
    models that draw random numbers, such as dropout.

    **Privacy** The guarantee is for a record, or another unit (`privacy.unit`), of each client separately,
    against an untrusted server that sees every update. Evaluation on test and held-out records is not covered.

    Raises:
        UserError: options are out of range, or contradict each other.
    """

    def __init__(
        self,
        population: Population,
        module: nn.Module,
        *,
        rounds: int,
        clients: ClientOptions | None = None,
        privacy: PrivacyOptions | None,
        network: NetworkOptions | None = None,
        strategies: Sequence[Strategy] = (),
        callbacks: Sequence[Callback | Strategy] = (),
        engine: Engine | str | None = None,
        seed: int = 0,
        output_dir: str | Path | None = None,
        device: str = "auto",
        evaluate_every: int = 1,
        exact_times: bool = False,
        fairness: "FairnessMeasure | None" = None,
        options: Mapping[str, Any] | None = None,
        new_net: Callable[[int], nn.Module] | None = None,
        remote: Remote | None = None,
    ) -> None:
        require(isinstance(population, Population), "population", "be a Population", type(population).__name__)
        require(isinstance(module, nn.Module), "module", "be a ClientModule or another module", type(module).__name__)
        clients, network = clients or ClientOptions(), network or NetworkOptions()
        for key, value, kind in (
            ("clients", clients, ClientOptions),
            ("privacy", privacy or PrivacyOptions(), PrivacyOptions),
            ("network", network, NetworkOptions),
        ):
            words = ", ".join(f"{name}={one!r}" for name, one in value.items()) if isinstance(value, Mapping) else "..."
            require(isinstance(value, kind), key, f"be {kind.__name__}", value, f"Write {kind.__name__}({words}).")
        for key, parts in (("strategies", strategies), ("callbacks", callbacks)):
            listed = isinstance(parts, Sequence) and not isinstance(parts, str)
            require(listed, key, f"be a list of {key}", parts, f"Write {key}=[...].")
        for key, number, least in (("rounds", rounds, 1), ("evaluate_every", evaluate_every, 1), ("seed", seed, 0)):
            require_whole(key, number, least)
        if isinstance(engine, str):
            require_one_of(ENGINES, "engine", engine)
            engine = build_engine(engine)
        require(engine is None or hasattr(engine, "compute"), "engine", "be a name or an Engine", engine)
        module = module if isinstance(module, ClientModule) else ClientModule(module)
        deciding = [*strategies, *(one for one in callbacks if isinstance(one, Strategy))]
        watching = [one for one in callbacks if not isinstance(one, Strategy)]
        registered, watching = register(_with_base(deciding), watching)
        ranks = Ranks(device)
        population = population.checked()
        unit = unit_of(privacy)
        if privacy is not None and unit.is_group:
            _check_unit(unit, privacy.sampling, registered)
        if remote is None:
            population = population.counting(unit)
        population, module = population.to(ranks.fabric.device), module.to(ranks.fabric.device)
        self.population, self.module, self._ranks = population, module, ranks
        must = "be null with records at sites"
        require(remote is None or fairness is None, "evaluation.fairness", must, fairness)
        require(remote is None or ranks.size == 1, "--nodes", "be used in one process", f"{ranks.size} ranks")
        facts = facts_of(population) if remote is None else remote.facts(population)
        sides: Clients
        if remote is not None:
            sides = remote.clients(population, module, privacy)
        else:
            engine = FastEngine() if engine is None else engine
            channel = Threads(engine) if ranks.size == 1 else RankChannel(engine, ranks)
            make = LocalClients if fairness is None else fairness.clients
            sides = make(population, module, channel, privacy)
        settings = client_settings(facts.num_records, clients, privacy, seed, facts.names)
        if module.task_advice and not (options or {}).get("data", {}).get("name"):  # that of a public data set is known
            warn_user(module.task_advice)
        _notice(module, clients)
        at_nodes = "" if remote is None else " --plan PLAN --nodes SOCKET ..."
        folder = Path(output_dir or new_folder())
        by_code = f"run(resume=True) of a FederatedLoop with output_dir={str(folder)!r}"
        caveats = [one for strategy in registered for one in strategy.caveats]
        caveats += [ENDS_BY_RESULTS] if any(overrides(strategy, "stop") for strategy in registered) else []
        config = RunConfig(
            facts=dataclasses.replace(
                facts,
                batch_size=tuple(client.batch_size for client in settings),
                reported_epsilon=reported_epsilons(clients, settings, seed, facts.names),
            ),
            settings=settings,
            privacy=None if privacy is None else dataclasses.replace(privacy, noise_key=None),
            strategies=registered,
            callbacks=[Curves(), GuaranteePage(), *watching],
            rounds=rounds,
            optimizer=None if module.optimizer_from else build_optimizer(clients.optimizer),
            rates=build_schedule(clients.schedule),
            network=network,
            seed=seed,
            output_dir=folder,
            evaluate_every=evaluate_every,
            caveats=(*sides.caveats, *caveats, *((EXACT_TIMES,) if exact_times else ())),
            exact_times=exact_times or not sides.source.protects,
            options=options or {},
            new_net=new_net,
            resume_command=f"{invocation('fit', ranks.command)} --resume {folder}{at_nodes}" if options else by_code,
        )
        super().__init__(sides, module, config)
        module.check_optimizer(rounds, [client.steps for client in settings])

    def run(self, resume: bool = False) -> RunResult:
        try:
            result = super().run(resume)
        finally:
            self.module.load(self.model.flat)
        if self._ranks.size == 1:
            return result
        trained, single = self._ranks.broadcast((self.model.flat, result.model is not None))  # of rank 0
        self.module.load(trained)
        return dataclasses.replace(result, model=copy.deepcopy(self.module.net).eval() if single else None)

    @property
    def local_clients(self) -> LocalClients:
        """The clients of a run whose records are in this process."""
        assert isinstance(self.clients, LocalClients), "the records are at sites"
        return self.clients

    def client_model(self, client: int) -> nn.Module:
        """Return a copy of `net` in evaluation mode with a client's final model, and its personal parameters if any.

        **Privacy** Post-processing: personal parameters are noised, too.
        """
        final_models = self.final_models(self.state)
        model = final_models.models[final_models.model_of[client]]
        module = copy.deepcopy(self.model)  # through which no record has passed
        module.load(self.clients.personalised(model, client))
        return module.net.eval()


def _check_unit(unit: Unit, sampling: str, strategies: Sequence[Strategy]) -> None:
    """Raise UserError if a part of the run works with records alone."""
    key = "privacy.unit"
    require(sampling == "poisson", key, f"be record with privacy.sampling {sampling}", unit.name, "Draw by poisson.")
    for strategy in strategies:
        fits = not strategy.jobs or any(job.any_unit for job in strategy.jobs)
        advice = "It releases what counts records, or their classes."
        require(fits, key, f"be record with {strategy.config_name}", unit.name, advice)


def _notice(module: ClientModule, clients: ClientOptions) -> None:
    """Say what a run does not use of a LightningModule, or of the clients' options because of it."""
    name, lines = type(module.net).__name__, []
    if module.unused:
        lines.append(f"not used of {name}: {', '.join(module.unused)}")
    if module.adapted is not None and not module.adapted.calls_forward:
        lines.append(f"training_step of {name} does not call forward, whose outputs give accuracy and metrics")
    if module.optimizer_from:
        usual, keys = ClientOptions(), ("learning_rate", "optimizer", "schedule")
        ignored = [f"clients.{key}" for key in keys if getattr(clients, key) != getattr(usual, key)]
        if ignored:
            lines.append(f"{module.optimizer_from} replaces {', '.join(ignored)}")
    for line in lines:
        warn_user(line)


def _with_base(strategies: Sequence[Strategy]) -> Sequence[Strategy]:
    """Return the strategies, preceded by an aggregation rule if they contain none."""
    if any(strategy.role == "base" for strategy in strategies if isinstance(strategy, Strategy)):
        return strategies
    wanted = [kind for one in strategies if (kind := getattr(one, "default_base", None))]
    base = [*wanted, SizeWeighted][0]()
    for one in strategies:
        kinds = [kind for kind in type(one).__mro__ if issubclass(kind, Strategy) and kind is not Strategy]
        said = any("role" in vars(kind) or kind.__module__.startswith("dpfl_lightning.") for kind in kinds)
        if isinstance(one, Strategy) and overrides(one, "weigh") and not said:
            words = f"the weights of {one.config_name} multiply those of {base.config_name}, because it has no role"
            warn_user(f'{words}: write role = "base" to replace them, or role = "correction"')
    return [base, *strategies]


def build_loop(
    options: Options,
    more: Sequence[Strategy | Callback] = (),
    population: Population | None = None,
    remote: Remote | None = None,
) -> FederatedLoop:
    """Return the loop of a configuration, with `more` strategies and callbacks, and possibly another population.

    `remote` are clients whose records are at sites; see `sites.server.deploy.loop_over`.
    """
    population = build_population(options) if population is None else population
    facts = facts_of(population)  # without the records, which may move to another device
    fairness = None
    if options.evaluation.fairness is not None:
        from dpfl_lightning.federated.client.fairness import build_fairness  # only for these

        fairness = build_fairness(options.evaluation.fairness)
    return FederatedLoop(
        population,
        build_module(options, facts),
        rounds=options.rounds,
        clients=options.clients,
        privacy=options.privacy,
        network=options.network,
        strategies=strategies.build(options.strategies),
        callbacks=more,
        engine=build_engine(options.engine.name, options.engine.workers, options.engine.trainer),
        seed=options.seed,
        output_dir=options.output_dir,
        device=options.engine.device,
        evaluate_every=options.evaluation.every,
        exact_times=options.evaluation.exact_times,
        fairness=fairness,
        options=dataclasses.asdict(options),
        new_net=lambda seed: build_net(dataclasses.replace(options, seed=seed), facts),
        remote=remote,
    )


def so_far(options: Options) -> tuple[bool, RunResult | None]:
    """Return whether the run in `output_dir` has begun, and its result if it has finished, else None.

    Raises UserError if the run began with other options.
    """
    folder = Path(str(options.output_dir))
    if (header := ClientFolder(folder).header()) is None:
        return RunFolder(folder).options.exists(), None
    now = deciding_options(dataclasses.asdict(options))
    result = read_result(folder)
    if result is None:
        del now["rounds"]  # fewer rounds are possible; the run itself refuses more
    public = {**now, "data": published_data(now.get("data"))}
    check_same(folder, {key: header.identity.get(key) for key in public}, public)
    if public != now:  # the ledger does not say how tables are written
        begun = deciding_options(dataclasses.asdict(from_mapping(read_yaml(options_file(str(folder), "output_dir")))))
        check_same(folder, {"data": begun["data"]}, {"data": now["data"]})
    return True, result
