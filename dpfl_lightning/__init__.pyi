from dpfl_lightning.config.options import ClientOptions as ClientOptions
from dpfl_lightning.config.options import PrivacyOptions as PrivacyOptions
from dpfl_lightning.data import Population as Population
from dpfl_lightning.errors import UserError as UserError
from dpfl_lightning.federated.client.module import ClientModule as ClientModule
from dpfl_lightning.federated.messages.facts import Facts as Facts
from dpfl_lightning.federated.server.callback import Callback as Callback
from dpfl_lightning.federated.server.results import RunResult as RunResult
from dpfl_lightning.federated.server.strategy import Strategy as Strategy
from dpfl_lightning.loop import FederatedLoop as FederatedLoop
from dpfl_lightning.models.saved import load_model as load_model
from dpfl_lightning.papers.distilled_data import DistilledDataModule as DistilledDataModule
from dpfl_lightning.papers.distilled_data import load_distilled as load_distilled
from dpfl_lightning.papers.sets.distilled_set import DistilledSet as DistilledSet
from dpfl_lightning.privacy.accounting.guarantee import Guarantee as Guarantee
from dpfl_lightning.reporting.progress import Progress as Progress

__version__: str
