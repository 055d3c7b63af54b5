"""Forwards a message to the Unix socket of this site's node, and returns the reply, or a fixed code if there is none.

The SuperNode names the socket: `--node-config 'socket="/run/dpfl/berlin.sock"'`.
"""

import socket

from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

NO_REPLY = 100  # code of an error that says that the node did not answer, and nothing else
MOST_BYTES = 1 << 32  # of a reply

app = ClientApp()


@app.query("forward")
def forward(message: Message, context: Context) -> Message:
    try:
        request = message.content["message"]["bytes"].data
        reply = exchange(str(context.node_config["socket"]), request, message.metadata.ttl)
        array = Array(dtype="uint8", shape=(len(reply),), stype="bytes", data=reply)
        return Message(RecordDict({"message": ArrayRecord({"bytes": array})}), reply_to=message)
    except Exception:  # its text might be private
        return Message(Error(NO_REPLY), reply_to=message)


def exchange(path: str, request: bytes, wait: float) -> bytes:
    """Return the reply of the node. Raises OSError if there is none after `wait` seconds."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as node:
        node.settimeout(wait)
        node.connect(path)
        node.sendall(request)
        node.shutdown(socket.SHUT_WR)  # the node closes the connection after its reply
        parts, size = [], 0
        while part := node.recv(1 << 20):
            parts.append(part)
            if (size := size + len(part)) > MOST_BYTES:
                raise OSError("the reply is too long")
    if not parts:
        raise OSError("the node closed the connection")
    return b"".join(parts)
