"""Images in folders: FOLDER/CLIENT/CLASS/*.png, *.tif, ..., and optionally FOLDER/test/CLASS/... for the test set."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from dpfl_lightning.config.names import check_names
from dpfl_lightning.data.pixels import extensions, read
from dpfl_lightning.errors import UserError, require

TEST = "test"
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
_OF_SYSTEMS = ("thumbs.db", "desktop.ini")  # files beside images that nobody has put there; others begin with a dot


class ImageFolder(TorchDataset):
    """The images of one client, each read when it is asked for: `[C, H, W]` in [0, 1], and its class.

    `size` (height, width) resizes them; `channels` is 3 (RGB) or 1 (grey). Raises UserError for files that are no
    images, because they would be left out.
    """

    def __init__(self, folder: Path, classes: Sequence[str], size: Sequence[int] | None, channels: int) -> None:
        self.files = [(path, label) for label, name in enumerate(classes) for path in _images(folder / name)]
        must = f"hold images ({', '.join(_SUFFIXES)}) in a folder for each class"
        require(len(self.files) >= 1, str(folder), must, "none")
        _require_no_images(folder, "be in the folder of a class")
        self.size, self.channels = size, channels

    def ids(self, end: str) -> list[str]:
        """Return the person of each image: its file's name up to the first `end`. Raises UserError."""
        require(isinstance(end, str) and end != "", "person", "be the sign after a person's id in names of files", end)
        without = sum(path.stem.find(end) < 1 for path, _ in self.files)
        require(without == 0, "person", "follow the id of a person in the name of each image", f"{without} without")
        return [path.stem.partition(end)[0] for path, _ in self.files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        path, label = self.files[row]
        try:
            return read(path, self.channels, self.size), label
        except UserError:
            raise
        except Exception as error:  # decoders raise anything for a broken file
            raise UserError(f"`{path}` must be a complete image, got: {type(error).__name__}: {error}.") from None


def image_folders(
    path: str | Path, classes: Sequence[str] | None, size: Sequence[int] | None, channels: int
) -> tuple[dict[str, ImageFolder], ImageFolder | None, int]:
    """Return the images of each client by its name, the test set or None, and the number of classes."""
    root = Path(path)
    require(root.is_dir(), "path", "be a folder with one folder for each client", str(path))
    require(channels in (1, 3), "channels", "be 3 (RGB) or 1 (grey)", channels)
    fits = size is None or (len(size) == 2 and all(isinstance(one, int) and one >= 1 for one in size))
    require(fits, "size", "be (height, width) in pixels, or null", size)
    _require_no_images(root, "be in the folder of a client and class")
    folders = {one.name: one for one in _folders(root)}
    check_names("path", folders)
    classes_of = {name: [one.name for one in _folders(folder)] for name, folder in folders.items()}
    test = folders.pop(TEST, None)
    require(len(folders) >= 1, "path", "hold one folder for each client", str(path))
    first = next(iter(folders))
    names = classes_of[first] if classes is None else [*map(str, classes)]
    for client, found in classes_of.items():
        fits = found == names if classes is None else set(found) <= set(names)
        must = f"hold the classes of client {first}, {names}" if classes is None else f"hold folders of {names} only"
        advice = 'State the public names of all classes, as in classes=["benign", "malignant"].'
        require(fits, str(root / client), must, found, advice if classes is None else "")
    clients = {name: ImageFolder(folder, names, size, channels) for name, folder in folders.items()}
    return clients, None if test is None else ImageFolder(test, names, size, channels), len(names)


def _folders(place: Path) -> list[Path]:
    return sorted(one for one in place.iterdir() if one.is_dir() and not one.name.startswith("."))


def _images(folder: Path) -> list[Path]:
    """Return the images of a class. Raises UserError if there is anything else, but for files of systems."""
    usual = [one for one in folder.glob("*") if not one.name.startswith(".") and one.name.lower() not in _OF_SYSTEMS]
    others = Counter(one.suffix or one.name for one in usual if one.is_dir() or one.suffix.lower() not in _SUFFIXES)
    must, advice = f"hold images ({', '.join(_SUFFIXES)}) only", "Convert them, or move them elsewhere."
    got = ", ".join(f"{count} {name}" for name, count in sorted(others.items()))
    require(not others, str(folder), must, got, advice)
    return sorted(usual)


def _require_no_images(folder: Path, must: str) -> None:
    known = extensions()  # also of formats that are not read: nothing is left out without a word
    found = [one.name for one in folder.glob("*") if one.is_file() and one.suffix.lower() in known]
    require(
        not found, str(folder), f"hold no images: each must {must}", f"{len(found)}, such as {min(found, default='')}"
    )
