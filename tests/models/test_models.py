"""Parameter counts that the papers state, outputs one record at a time, and which nets are refused."""

import pytest
import torch
from torch import nn

from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.models import MODELS, PersonalInput, build, check_net, fixed
from dpfl_lightning.models.model import Model
from dpfl_lightning.models.thread_safe_loss import ThreadSafeLoss
from dpfl_lightning.runtime.threads import side_by_side

COUNTS = [
    ("cnn_small", (1, 28, 28), 10, {}, 28_938),
    ("cnn_tiny", (1, 28, 28), 10, {}, 4_266),
    ("cnn_femnist", (1, 28, 28), 62, {}, 67_026),
    ("lenet5", (1, 28, 28), 10, {}, 61_706),
    ("convnet", (3, 32, 32), 10, {}, 320_010),
    ("convnet", (1, 28, 28), 10, {}, 317_706),
    ("convnet", (3, 32, 32), 10, {"width": 32}, 24_714),
    ("convnet", (3, 32, 32), 10, {"width": 64}, 86_282),
    ("convnet", (3, 32, 32), 10, {"width": 256}, 1_229_834),
    ("resnet20", (3, 32, 32), 10, {}, 272_474),
    ("resnet18", (3, 32, 32), 10, {}, 11_181_642),
    ("resnet34", (3, 32, 32), 10, {"norm": "none"}, 21_272_778),
    ("resnet34", (3, 32, 32), 10, {}, 21_289_802),
    ("resnet34", (3, 32, 32), 100, {"norm": "none"}, 21_318_948),
    ("logistic", (1, 8, 8), 10, {}, 650),
    ("linear", (10,), 1, {}, 11),
]


def count(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def test_parameter_counts_are_those_of_the_papers():
    assert {name for name, *_ in COUNTS} == set(MODELS), "every model has a stated count"
    with torch.device("meta"):  # counts need no memory and no initialisation
        for name, shape, classes, options, parameters in COUNTS:
            assert count(build(name, shape, classes, **options)) == parameters, (name, shape, classes, options)


SMALL = {"convnet": {"width": 8}}
SHAPES = {"linear": (10,), "logistic": (3, 4)}


def test_per_record_outputs_and_gradients_are_those_of_the_batch():
    for name in MODELS:
        torch.manual_seed(0)
        shape, outputs = SHAPES.get(name, (1, 28, 28)), 1 if name == "linear" else 10
        net = build(name, shape, outputs, **SMALL.get(name, {}))
        check_net(net)
        x = torch.randn(2, *shape)
        together = net(x)
        assert together.shape == (2, outputs), name
        torch.testing.assert_close(together, torch.cat([net(one[None]) for one in x]), rtol=1e-4, atol=1e-5)
        if name in ("resnet18", "resnet34"):  # large
            continue

        def loss(params, x, net=net):
            return torch.func.functional_call(net, params, (x[None],)).square().sum()

        params = {key: value.detach() for key, value in net.named_parameters()}
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
        both = torch.autograd.grad(together.square().sum(), list(net.parameters()))
        for one, summed in zip(each.values(), both, strict=True):
            torch.testing.assert_close(one.sum(dim=0), summed, rtol=1e-3, atol=1e-4)


def test_a_personal_input_is_at_first_the_identity_and_counted():
    for shape, extra in (((1, 28, 28), 785), ((3, 32, 32), 3_075), ((10,), 20)):
        net = build("linear", shape, 1)
        own = PersonalInput(net, shape)
        assert count(own) == count(net) + extra
        assert sum(p.numel() for name, p in own.named_parameters() if name in own.personal) == extra
        x = torch.randn(3, *shape)
        torch.testing.assert_close(own(x), net(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    "name, shape, classes, options, message",
    [
        ("cnn_smal", (1, 28, 28), 10, {}, r"`model.name` must be one of .* Did you mean `cnn_small`\?"),
        ("convnet", (1, 28, 28), 10, {"widht": 3}, r"`model.widht` must be an option .* Did you mean `width`"),
        ("convnet", (1, 28, 28), 10, {"norm": "batch"}, "`model.norm` must be one of instance, group, layer, none"),
        ("convnet", (1, 28, 28), 10, {"width": 6, "norm": "group"}, "`model.width` must be a multiple of 4"),
        ("convnet", (1, 8, 8), 10, {"depth": 4}, r"`input_shape` must be large enough for convnet, got \(1, 8, 8\)"),
        ("cnn_small", (10,), 10, {}, r"It takes images, not records of shape \(10,\)"),
        ("linear", (10,), 3, {}, "`num_classes` must be 1 for linear, a regression, got 3. Use logistic"),
        ("logistic", (10,), 1, {}, "`num_classes` must be at least 2 for logistic, got 1. Use linear"),
        ("cnn_small", (1, 28, 28), 0, {}, "`num_classes` must be at least 1"),
    ],
)
def test_wrong_models_are_named(name, shape, classes, options, message):
    with pytest.raises(UserError, match=message):
        build(name, shape, classes, **options)


@pytest.mark.parametrize(
    "layer, message",
    [
        (nn.BatchNorm1d(5), r"`net.1.0` must see one record at a time, got BatchNorm1d.*nn.GroupNorm\(1, 5\)"),
        (nn.BatchNorm2d(4), r"got BatchNorm2d, which mixes the records of a batch. Use nn.GroupNorm\(1, 4\) instead"),
        (nn.BatchNorm2d(4, affine=False, track_running_stats=False), "got BatchNorm2d"),
        (nn.SyncBatchNorm(4), "got SyncBatchNorm"),
        (nn.InstanceNorm2d(4, track_running_stats=True), "keeps statistics .* Use track_running_stats=False instead"),
        (nn.LazyLinear(4), "`net.1.0.weight` must have a shape"),
        (nn.Linear(2, 2).requires_grad_(False), "`net` must have a trainable parameter"),
        (nn.ParameterList([nn.Parameter(torch.ones(2).int(), requires_grad=False)]), "must be floating"),
    ],
)
def test_nets_that_cannot_be_private_are_refused(layer, message):
    with pytest.raises(UserError, match=message):
        check_net(nn.Sequential(nn.ReLU(), nn.Sequential(layer)))
    if isinstance(layer, nn.BatchNorm1d):
        with pytest.raises(UserError, match="got BatchNorm1d"):
            check_net(layer)


def test_nets_that_can_be_private_pass():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    norms = [nn.GroupNorm(1, 2), nn.InstanceNorm1d(2), nn.LayerNorm(2)]
    check_net(nn.Sequential(frozen, *norms, nn.Dropout(), nn.Linear(2, 2)))


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_the_loss_reads_a_tensor_of_several_names_from_the_given_parameters(kind):
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))
    weight = net[0].weight
    del net[2].weight
    net[2].register_parameter("weight", weight) if kind == "parameter" else net[2].register_buffer("weight", weight)
    given, x, y = torch.randn(3, 3), torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    expected = nn.functional.cross_entropy((x @ given.mT).tanh() @ given.mT, y, reduction="none")
    torch.testing.assert_close(Model(net).sample_loss({"0.weight": given}, x, y), expected)


def test_several_threads_may_ask_for_the_loss_of_other_parameters_at_a_time():
    module = Model(build("convnet", (1, 12, 12), 3, width=4, depth=2))
    loss, x, y = ThreadSafeLoss(module), torch.randn(5, 1, 12, 12), torch.tensor([0, 1, 2, 0, 1])
    starts = [factor * module.flat for factor in torch.linspace(0.5, 1.5, 40)]
    expected = [loss(module.unflatten(start), x, y) for start in starts]
    found = side_by_side(lambda start: loss(module.unflatten(start), x, y), starts)
    torch.testing.assert_close(found, expected)
    assert torch.equal(module.flat, starts[0] / 0.5)


def test_layers_that_mix_records_are_replaced_if_asked_for():
    shared = nn.BatchNorm2d(16)
    net = nn.Sequential(nn.Conv2d(1, 16, 3), shared, shared, nn.BatchNorm1d(6).eval(), nn.InstanceNorm2d(4))
    net.append(nn.InstanceNorm2d(4, affine=True, track_running_stats=True))
    with pytest.warns(UserNotice, match=r"replaced 1: BatchNorm2d by GroupNorm\(2, 16") as caught:
        new = fixed(net)
    check_net(new)
    assert len(caught) == 1 and new[1] is new[2] and isinstance(new[3], nn.BatchNorm1d) and net[1] is shared
    assert new[5].weight is not None and not dict(new[5].named_buffers()) and net[5].running_mean is not None
    with pytest.raises(UserError, match=r"`model\.fix: true`, or ClientModule"):
        check_net(nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4)))


class WithActivation(nn.BatchNorm2d):
    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(super().forward(x))


@pytest.mark.parametrize(
    ("layer", "shape", "groups"),
    [
        (nn.BatchNorm1d(64), (64,), 1),
        (nn.BatchNorm1d(12), (12, 7), 1),
        (nn.BatchNorm2d(64), (64, 1, 1), 8),
        (nn.BatchNorm2d(6), (6, 1, 1), 1),
        (nn.BatchNorm2d(1024), (1024, 2, 2), 32),
        (nn.BatchNorm3d(36), (36, 2, 2, 2), 4),
        (nn.SyncBatchNorm(20), (20, 3, 3), 2),
    ],
)
def test_no_group_has_so_few_numbers_that_only_signs_are_left(layer, shape, groups):
    with pytest.warns(UserNotice):
        norm = fixed(layer)
    assert norm.num_groups == groups
    outputs = norm(torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)))
    assert len(outputs.detach().flatten().round(decimals=3).unique()) > 10


def test_a_subclass_of_batch_norm_keeps_its_activation():
    with pytest.warns(UserNotice, match="WithActivation"):
        new = fixed(nn.Sequential(nn.Conv2d(1, 16, 3), WithActivation(16)))
    check_net(new)
    x = torch.randn(2, 1, 8, 8)
    assert (new(x) >= 0).all()
    torch.testing.assert_close(new(x)[:1], new(x[:1]))


def test_torchscript_and_complex_parameters_are_refused_with_a_way_out():
    with pytest.raises(UserError, match=r"`net.0` must be Python code, got 'TorchScript'. Pass the module that"):
        check_net(nn.Sequential(torch.jit.script(nn.Linear(4, 2))))
    net = nn.Linear(4, 2)
    net.phase = nn.Parameter(torch.zeros(2, dtype=torch.cfloat))
    with pytest.raises(UserError, match=r"`net.phase` must be floating, got torch.complex64. Keep real and imaginary"):
        check_net(net)
