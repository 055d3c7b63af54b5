"""Users' records: pairs of arrays or torch Datasets, as tensors that fit together."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from dpfl_lightning.config.yaml_text import inline
from dpfl_lightning.data.loaders import records_of
from dpfl_lightning.data.pixels import pixels_of
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.models.tasks import IGNORED
from dpfl_lightning.privacy.clipping.inputs import PAIR, BatchForm, Inputs, record_shape, take

_READ_AGAIN = 8  # records of a client, to see whether they change
_FEW = 20  # labels, whose size is by chance
_MOST_RATIO = 50  # of sizes of labels of two clients
Classes = Sequence[Any] | None  # names of the classes, in the order of their numbers


@dataclass(frozen=True)
class Source:
    """The records of one client as a user gave them: arrays of a `BatchForm`, or a map-style Dataset of such records.

    `where` is its name in messages, and `label` that of y. With `classes` the labels are names of classes.
    """

    records: Any
    where: str
    classes: Classes = None
    form: BatchForm = PAIR
    label: str = "y"

    @classmethod
    def of(cls, given: Any, where: str, classes: Classes = None, label: str | None = None) -> "Source":
        """Raises UserError unless `given` holds records with a length and an index."""
        given = records_of(given, where) if isinstance(given, DataLoader) else given
        given = given.tensors if isinstance(given, TensorDataset) else given
        if isinstance(given, TorchDataset) or _is_list_of_records(given):
            has_length = hasattr(given, "__len__") and not isinstance(given, IterableDataset)
            advice = "Collect its records into tensors."
            require(has_length, where, "be a Dataset with a length and an index", type(given).__name__, advice)
            require(len(given) >= 1, where, "hold at least one record", 0)
            return cls(given, where, classes, BatchForm.of(given[0], label, where), label or "y")
        form = BatchForm.of(given, label, where)
        given_x, given_y = form.separated(given)
        kind, advice = type(given_x).__name__, "Use Population.from_dataframe, or df.to_numpy()."
        require(not hasattr(given_x, "to_numpy"), f"{where}: x", "be a tensor or an array", kind, advice)
        advice = "Join several targets as columns, y [records, targets], and take them apart in the loss."
        require(
            not isinstance(given_y, tuple | Mapping), f"{where}: y", "be one tensor", type(given_y).__name__, advice
        )
        for part in (given_x, given_y):
            sparse = isinstance(part, Tensor) and part.layout is not torch.strided
            require(not sparse, f"{where}", "hold dense tensors", "a sparse one", "Call its .to_dense().")
        x = _parts(given_x, lambda part: part if isinstance(part, Tensor | np.ndarray) else _tensor(part, where))
        for part in tree_leaves(x):
            must = "have the shape [records, ...]"
            require(part.ndim >= (2 if part is x else 1), f"{where}: x", must, tuple(part.shape))
            require(len(part) >= 1, f"{where}: x", "hold at least one record", tuple(part.shape))
        counts = {len(part) for part in tree_leaves(x)}
        require(len(counts) == 1, f"{where}: x", "hold tensors of one number of records", sorted(counts))
        y = given_y if isinstance(given_y, Tensor) else _array(given_y, f"{where}: {label or 'y'}")
        return cls((x, y), where, classes, form, label or "y")

    def __len__(self) -> int:
        return len(tree_leaves(self.records[0])[0]) if isinstance(self.records, tuple) else len(self.records)

    def read(self, rows: np.ndarray | None = None) -> tuple[Inputs, Tensor]:
        """Return x [b, *X] and y [b, ...] of some rows, by default of all: float32 for floats, int64 for integers."""
        if isinstance(self.records, tuple):
            x, y = self.records
            x = x if rows is None else take(x, rows)
            y = y if rows is None else y[rows]
        else:
            x, y = self._collected(range(len(self)) if rows is None else rows.tolist())
        x, y = tree_map(lambda part: _as_input(part, f"{self.where}: x"), x), self._labels(y)
        count = len(tree_leaves(x)[0])
        must = f"have the shape [{count}, ...]"
        require(y.shape[:1] == (count,), f"{self.where}: {self.label}", must, tuple(y.shape))
        for name, part in (*(("x", leaf) for leaf in tree_leaves(x)), (self.label, y)):
            require(bool(part.isfinite().all()), f"{self.where}: {name}", "be finite", "NaN or infinity")
        return x, y

    def check_constant(self) -> None:
        """Raise UserError if some records, chosen by their number alone, differ when they are read again.

        A data set that draws transforms at random would be trained on one draw, or no longer have the records that were
        checked and counted. Of a record that is flipped by a coin, three reads are equal with probability 1/4.
        """
        if isinstance(self.records, tuple):
            return
        rows = np.unique(np.linspace(0, len(self) - 1, _READ_AGAIN).astype(np.int64))
        first, *others = (tree_leaves(self.read(rows)) for _ in range(3))
        same = all(torch.equal(*parts) for other in others for parts in zip(first, other, strict=True))
        got = "other ones when some were read again"
        advice = "Leave random transforms out of the data set, and draw them in the model's `training_step`."
        require(same, self.where, "return the same records at each reading", got, advice)

    def inputs(self, rows: np.ndarray) -> Inputs:
        """Return x of some rows, as `read`, without the labels."""
        return self.read(rows)[0]

    def _collected(self, rows: Sequence[int]) -> tuple[Inputs, Any]:
        given = [self.records[row] for row in rows]
        for record in given:
            form = BatchForm.of(record, self.form.label or None, self.where)
            require(form == self.form, self.where, f"yield records of one form, {self.form}", str(form))
        records = [self.form.separated(record) for record in given]
        inputs = [_parts(x, lambda part: _tensor(part, self.where)) for x, _ in records]
        shapes = {str(tree_map(lambda part: tuple(part.shape), x)) for x in inputs}
        got = " and ".join(sorted(shapes)[:5])
        advice = "Resize images, as by from_image_folder(size=(28, 28)), and pad or cut lists of tokens to one length."
        require(len(shapes) == 1, self.where, "yield records of one shape", got, advice)
        labels = [y if self.classes is not None or isinstance(y, str) else _tensor(y, self.where) for _, y in records]
        of_tensors = isinstance(labels[0], Tensor)
        return tree_map(lambda *parts: torch.stack(parts), *inputs), torch.stack(labels) if of_tensors else labels

    def _labels(self, y: Any) -> Tensor:
        where = f"{self.where}: {self.label}"
        if self.classes is None:
            text = y.dtype.kind in "OUS" if isinstance(y, np.ndarray) else isinstance(y, list) and isinstance(y[0], str)
            advice = 'Name the classes, a public fact, as in classes=["benign", "malignant"].'
            require(not text, where, "hold numbers if no classes are given", "text", advice)
            labels = _tensor(y, self.where)
            return labels.float() if labels.is_floating_point() else labels.long()
        one_each = getattr(y, "ndim", 1) == 1
        require(one_each, where, "be one label for each record if classes are named", tuple(getattr(y, "shape", ())))
        number_of = {name: number for number, name in enumerate(self.classes)}
        names = (
            y.tolist()
            if isinstance(y, Tensor | np.ndarray)
            else [getattr(one, "item", lambda one=one: one)() for one in y]
        )
        unknown = next((name for name in names if name not in number_of), None)
        yes_no = "YAML reads yes and no without quotation marks as true and false: write 'yes' and 'no'."
        replace = (
            f"If it means one of them, write replace: {{{self.label}: {{{inline(unknown)}: ...}}}} beside its table."
        )
        advice = yes_no if isinstance(unknown, str) and any(one is True for one in self.classes) else replace
        require(unknown is None, where, f"hold the given classes only, {list(self.classes)}", unknown, advice)
        return torch.tensor([number_of[name] for name in names])


def _is_list_of_records(given: Any) -> bool:
    """Whether it is a list of dictionaries, or a data set of another library, such as Hugging Face's."""
    if isinstance(given, list):
        return bool(given) and isinstance(given[0], Mapping)
    known = isinstance(given, tuple | Mapping | str | Tensor | np.ndarray) or hasattr(given, "to_numpy")
    return not known and hasattr(given, "__len__") and hasattr(given, "__getitem__")


def _parts(x: Any, convert: Any) -> Inputs:
    """Convert the tensors of an input: of a dictionary, in the order of its keys, or of a tuple of arrays."""
    if isinstance(x, Mapping):
        return {str(name): convert(x[name]) for name in sorted(x)}
    if isinstance(x, tuple) and x and all(isinstance(part, Tensor | np.ndarray) or _is_image(part) for part in x):
        return tuple(convert(part) for part in x)
    return convert(x)


def _array(values: Any, where: str) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError as error:
        raise UserError(f"`{where}` must hold one label for each record, got: {error}.") from None


def _as_input(part: Tensor | np.ndarray, where: str) -> Tensor:
    tensor = _tensor(part, where)
    must, advice = "be floating, or int64 for rows of a table", "Pass x.float() / 255 for images, x.long() for tokens."
    fits = tensor.dtype != torch.uint8 and not tensor.is_complex()
    require(fits, where, must, tensor.dtype, advice)
    if tensor.dtype == torch.bool:
        return tensor
    return tensor.float() if tensor.is_floating_point() else tensor.long()


def _is_image(value: Any) -> bool:
    return hasattr(value, "getbands")  # of PIL, which need not be imported


def _tensor(value: Any, where: str) -> Tensor:
    if _is_image(value):
        return pixels_of(value, where)
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()  # torch warns of others
    try:
        return torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        got = f"{type(value).__name__}: {error}"
        advice = "Convert images to tensors. Tokenise text to whole numbers, and pad or cut all records to one length."
        raise UserError(f"`{where}` must hold numbers, got {got}. {advice}") from error


def check_same_form(pairs: Sequence[tuple[str, Inputs, Tensor]], num_classes: int | None, label: str) -> int:
    """Check that every source (its name, x, y) fits the first one, and return num_classes, 1 for a regression.

    `label` is the name of y in messages.
    """
    first, first_x, first_y = pairs[0]
    regression = first_y.is_floating_point()
    shape, dtypes = record_shape(first_x), _dtypes(first_x)
    for where, x, y in pairs:
        must = f"have records of shape {shape}, as {first}"
        require(record_shape(x) == shape, f"{where}: x", must, record_shape(x))
        require(_dtypes(x) == dtypes, f"{where}: x", f"be {dtypes}, as {first}", _dtypes(x))
        require(y.dtype == first_y.dtype, f"{where}: {label}", f"be {first_y.dtype}, as {first}", y.dtype)
        must = f"have labels of shape {tuple(first_y.shape[1:])}, as {first}"
        require(y.shape[1:] == first_y.shape[1:], f"{where}: {label}", must, tuple(y.shape[1:]))
    if regression:
        advice = "Pass y.long() for classes."
        require(num_classes in (None, 1), "num_classes", "be 1 if y is floating", num_classes, advice)
        _check_units([(where, y) for where, _, y in pairs], label)
        return 1
    advice = "The largest label would reveal that a record has it: state the public number, as in num_classes=3."
    whole = isinstance(num_classes, int) and not isinstance(num_classes, bool) and num_classes >= 1
    require(whole, "num_classes", "be the number of classes (at least 1)", num_classes, advice)
    assert num_classes is not None  # for mypy
    for where, _, y in pairs:
        check_range(f"{where}: {label}", y, num_classes)
    return num_classes


def _check_units(labels: Sequence[tuple[str, Tensor]], label: str) -> None:
    """Raise UserError if labels of a regression have another unit than those of the first source, by their size."""
    sizes = [(where, [_size(part) for part in (y.T if y.ndim == 2 else [y])]) for where, y in labels]
    known = [(where, torch.tensor(size)) for where, size in sizes if not all(map(math.isnan, size))]
    for where, size in known[1:]:
        ratio = size / known[0][1]
        far = ratio[ratio.log().abs() > math.log(_MOST_RATIO)]
        got = f"about {float(far[0]):.0e} times as large" if len(far) else ""
        advice = "Write all labels in one unit, or divide them by a public constant."
        require(not len(far), f"{where}: {label}", f"be of the scale of {known[0][0]}", got, advice)


def _size(y: Tensor) -> float:
    """Return the median absolute value of labels other than 0, which no single record moves; NaN of a few."""
    sizes = y[y != 0].abs()
    return float(sizes.median()) if len(sizes) >= _FEW else math.nan


def check_range(where: str, y: Tensor, num_classes: int) -> None:
    """Raise UserError unless labels [n, ...] that are no floating values are below `num_classes`."""
    if y.is_floating_point() or not len(y):  # no records: those of sites are elsewhere
        return
    several = y.ndim > 1  # of which some may be ignored, or each is 0 or 1
    most = max(num_classes, 2) if several else num_classes
    y = y.where(y != IGNORED, 0) if several else y
    label_range = int(y.min()), int(y.max())
    must = f"hold classes from 0 to {most - 1}{f', or {IGNORED} where a task ignores a label' * several}"
    advice = "If they are names of classes, name these in their order, as in classes: [1, 2, 3]."
    advice = "num_classes says how many values a label has, such as classes or intervals." if several else advice
    require(label_range[0] >= 0 and label_range[1] < most, where, must, label_range, advice)


def check_rows(count: int, train_of: Sequence[Tensor], held_out_of: Sequence[Tensor], test: Tensor | None) -> bool:
    """Return whether clients share training records.

    Raises UserError unless all rows are below `count`, no client has one twice, and none is in the test set, too.
    """
    pairs, none = list(zip(train_of, held_out_of, strict=True)), torch.zeros(0, dtype=torch.long)
    sizes = torch.tensor([len(train) + len(held_out) for train, held_out in pairs], dtype=torch.long)
    rows = torch.cat([none, *(part.cpu() for parts in pairs for part in parts)])
    on_test = rows.new_zeros(0) if test is None else test.cpu()
    everything = torch.cat([rows, on_test])
    fits = not everything.is_floating_point() and (not len(everything) or int(everything.min()) >= 0)
    fits = fits and (not len(everything) or int(everything.max()) < count)
    require(fits, "Population", f"hold rows from 0 to {count - 1}", "other rows")
    twice = len((rows + count * torch.arange(len(sizes)).repeat_interleave(sizes)).unique()) < len(rows)
    advice = "A record that counts twice moves a sum by two clip norms, and a held-out record must not be trained on."
    require(not twice, "Population", "hold each row of a client once", "a row that occurs twice", advice)
    train = torch.cat([none, *(part.cpu() for part in train_of)])
    overlap = bool(torch.isin(train, on_test).any())
    require(not overlap, "Population.test", "hold no training record", "rows that a client trains on")
    return len(train.unique()) < len(train)


def _dtypes(x: Inputs) -> Any:
    return tree_map(lambda part: part.dtype, x)
