"""Your strategy: how updates are weighed. It is compared with the default on the same records, in one run each.

Budgets differ by a factor of 40, so some updates are mostly noise. The default weighs clients by their data sizes. This
strategy leaves out the least precise updates. It receives noisy updates and public facts, so it costs no privacy. (The
package's rule for this case is `noise_aware`.)
"""

import torch
from figure import save_figure
from sklearn.datasets import load_digits

from dpfl_lightning import ClientModule, ClientOptions, FederatedLoop, Population, PrivacyOptions, RunResult, Strategy

SIZES = [140] * 10
EPSILONS = [0.2, 0.2, 0.2, 0.2, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0]


class MostPrecise(Strategy):
    """Averages the share of updates with the least noise, by data size."""

    role = "base"

    def __init__(self, share: float = 0.5) -> None:
        self._share = share

    def weigh(self, updates, view):
        noise = torch.tensor(updates.noise_std)
        kept = noise <= noise.quantile(self._share)
        return kept * torch.tensor([view.facts.num_records[client] for client in updates.clients])


def trained(*strategies: Strategy) -> RunResult:
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float32).split([*SIZES, 397]), torch.tensor(y).split([*SIZES, 397])
    *clients, test = zip(x, y, strict=True)
    return FederatedLoop(
        Population.from_datasets(clients, test, held_out=0, num_classes=10),
        ClientModule(torch.nn.Linear(64, 10)),
        rounds=10,
        clients=ClientOptions(batch_size=28, learning_rate=0.5),
        # a simulation: the key repeats the run, and protects nobody; another strategy draws other noise
        privacy=PrivacyOptions(epsilon=EPSILONS, delta=1e-3, noise_key="00" * 16),
        strategies=strategies,
    ).run()


default, precise = trained(), trained(MostPrecise())
save_figure("Digits: default and own strategy", default=default, MostPrecise=precise)
