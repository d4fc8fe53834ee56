"""HEALTHCHECK of the images: exit status 0 if the server in this container is ready. The images have no curl."""

import os
import sys
import urllib.request

TIMEOUT_SECONDS = 4.0  # below the --timeout of HEALTHCHECK


def main() -> int:
    """Ask /v2/health/ready on port KVSEEK_METRICS_PORT (8002); returns 0 if it says yes, else 1 after printing why.

    Not the HTTP port: clients may have taken all of its connections.
    """
    url = f"http://127.0.0.1:{os.environ.get('KVSEEK_METRICS_PORT', '8002')}/v2/health/ready"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy leads into this container
    try:
        opener.open(url, timeout=TIMEOUT_SECONDS).close()  # raises for statuses of 400 and more, too
    except OSError as error:
        print(f"not ready: {url}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
