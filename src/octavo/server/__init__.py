"""HTTP server for ``octavo.inference``: the OpenAI API, KServe's protocol v2 and a chat page.

Needs starlette, uvicorn, h11, jinja2, httpx2 and prometheus-client: ``pip install 'octavo[serve]'``.

The path of a request:

1. Connection: connections.py (uvicorn's protocol with limits), started by http_server.py.
2. Key, origin, size and arrival of the body, number of requests: guard.py, with the numbers of limits.py.
3. Route: app.py, to the endpoint in completions.py, chats.py, kserve.py, models.py or metrics.py.
4. Types and ranges of the body's fields: read by fields.py, declared in the endpoint's file, sampling_fields.py and
   kserve_fields.py; lengths of prompts: service.py, which also renders and tokenizes them (thread_pools.py).
5. Generation: ``octavo.inference.EngineThread``; the response: responses.py; errors: error_responses.py.
"""

from octavo.server.app import create_app
from octavo.server.chat_template import ChatTemplate
from octavo.server.http_server import Address, Server
from octavo.server.limits import Limits
from octavo.server.loading import answer_not_ready
from octavo.server.service import Service, State

__all__ = ["Address", "ChatTemplate", "Limits", "Server", "Service", "State", "answer_not_ready", "create_app"]
