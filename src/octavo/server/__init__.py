"""HTTP server for ``octavo.inference``: the OpenAI API, KServe's protocol v2 and a chat page.

Needs starlette, uvicorn and prometheus-client: ``pip install 'octavo[serve]'``.
"""

from octavo.server.app import create_app
from octavo.server.chat_template import ChatTemplate
from octavo.server.http_server import Address, Server
from octavo.server.limits import Limits
from octavo.server.loading import answer_not_ready
from octavo.server.service import Service, State

__all__ = ["Address", "ChatTemplate", "Limits", "Server", "Service", "State", "answer_not_ready", "create_app"]
