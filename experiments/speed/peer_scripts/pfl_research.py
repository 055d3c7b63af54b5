"""Rounds of pfl-research's simulation without privacy: federated averaging of plain SGD on its PyTorch backend.

Run by `speed/peers.py` in an environment with pfl and torch, without this package. One process with torch's default
threads. A round is a central iteration, which waits on standard input; only the first, a warm-up, evaluates.
"""

import json
import sys
from pathlib import Path

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

JOB = json.loads(Path(sys.argv[1]).read_text())
FOLDER = Path(sys.argv[1]).parent


class Net(torch.nn.Module):
    """The model with the two methods that pfl asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.load(FOLDER / "net.pt", weights_only=False)

    def loss(self, x, y):
        return torch.nn.functional.cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x, y):
        return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}


class OnRequest(TrainingProcessCallback):
    """Lets a round begin when it is asked for, and says when it is done."""

    def on_train_begin(self, *, model):
        sys.stdin.readline()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        print("DONE", flush=True)
        return not sys.stdin.readline(), Metrics()


def main() -> None:
    records = {str(i): torch.load(FOLDER / f"client_{i}.pt") for i in range(JOB["clients"])}
    data = FederatedDataset(
        lambda client: PyTorchTensorDataset(records[client], user_id=client),
        get_user_sampler("minimize_reuse", list(records)),
    )
    net = Net()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=JOB["rounds"],
            evaluation_frequency=JOB["rounds"],
            train_cohort_size=JOB["clients"],
            val_cohort_size=None,
        ),
        SimulatedBackend(data, data),
        PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
        NNTrainHyperParams(
            local_batch_size=JOB["batch_size"], local_num_epochs=1, local_learning_rate=JOB["learning_rate"]
        ),
        callbacks=[OnRequest()],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
