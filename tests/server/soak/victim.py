"""A client process of the soak test that is killed in the middle of its stream: one request, a line for each piece."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.server.soak.calls import CallError, make_call


def main(argument: str) -> None:
    """Send the request of `argument`, a JSON object, and print [count, text, ids] for each piece of the answer."""
    wanted: dict[str, Any] = json.loads(argument)
    call = make_call(wanted["route"], wanted["urls"], wanted["model"], wanted["fields"])
    try:
        call.send()
        for piece in call.pieces():
            print(json.dumps([piece.count, piece.text, piece.ids]), flush=True)
    except CallError as error:
        print(error, file=sys.stderr, flush=True)
    os._exit(0)  # at once: the threads of a gRPC client would be waited for


if __name__ == "__main__":
    main(sys.argv[1])
