"""The few classes of Flower that our app and our server use, without its network; they hold what the real ones hold."""

import importlib.util
import itertools
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

APP = Path(__file__).parents[1] / "examples" / "flower"


class RecordDict(dict):
    pass


class ArrayRecord(dict):
    pass


@dataclass
class Array:
    dtype: str
    shape: tuple
    stype: str
    data: bytes


@dataclass
class Error:
    code: int
    reason: str | None = None


@dataclass
class Metadata:
    message_id: str = ""
    reply_to_message_id: str = ""
    src_node_id: int = 1
    dst_node_id: int = 0
    ttl: float = 43200.0


class Message:
    def __init__(self, content, dst_node_id=0, message_type="query", *, ttl=43200.0, reply_to=None):
        self.error = content if isinstance(content, Error) else None
        self.content = None if self.error else content
        self.message_type = message_type
        self.metadata = Metadata(dst_node_id=dst_node_id, ttl=ttl)
        if reply_to is not None:
            self.metadata.reply_to_message_id = reply_to.metadata.message_id

    def has_error(self):
        return self.error is not None


class App:
    def __init__(self):
        self.handlers = {}

    def query(self, action):
        return lambda handler: self.handlers.setdefault(f"query.{action}", handler)

    def main(self):
        return lambda handler: self.handlers.setdefault("main", handler)


def install(monkeypatch) -> None:
    """Let `import flwr` find these classes until the test ends."""
    shared = {"Array": Array, "ArrayRecord": ArrayRecord, "Context": SimpleNamespace, "Error": Error}
    names = {
        "flwr": {},
        "flwr.app": {**shared, "Message": Message, "RecordDict": RecordDict},
        "flwr.clientapp": {"ClientApp": App},
        "flwr.serverapp": {"ServerApp": App, "Grid": object},
    }
    for name, content in names.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


def app(name: str):
    """A module of the app folder, imported anew; call `install` before."""
    spec = importlib.util.spec_from_file_location(f"app_{name}", APP / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class FakeGrid:
    """SuperNodes by their numbers, each with the socket of a node; every message is forwarded in a thread."""

    sockets: dict
    handlers: dict
    replies: dict = field(default_factory=dict)
    sent: list = field(default_factory=list)
    numbers: itertools.count = field(default_factory=itertools.count)

    def get_node_ids(self):
        return list(self.sockets)

    def push_messages(self, messages):
        return [self._push(message) for message in messages]

    def _push(self, message):
        if message.metadata.dst_node_id not in self.sockets:
            return None
        message.metadata.message_id = f"message{next(self.numbers)}"
        self.sent.append(message)
        context = SimpleNamespace(node_config={"socket": self.sockets[message.metadata.dst_node_id]})
        threading.Thread(target=self._forward, args=(message, context), daemon=True).start()
        return message.metadata.message_id

    def _forward(self, message, context):
        self.replies[message.metadata.message_id] = self.handlers[message.message_type](message, context)

    def pull_messages(self, message_ids):
        return [self.replies.pop(number) for number in message_ids if number in self.replies]
