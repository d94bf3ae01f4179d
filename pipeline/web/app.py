"""From a request to its handler: host and origin, route, right, answer, count, log."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.responses import Response
from starlette.routing import Route, Router

from pipeline.web import batches, dead, messages, probes, topics
from pipeline.web.access import Access, Right
from pipeline.web.api import Api, problem_of
from pipeline.web.call import Call, ClientGone, problem_answer
from pipeline.web.problems import Problem

NO_ROUTE: Final = "-"

log = logging.getLogger(__name__)

Handler = Callable[[Api, Call], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Operation:
    """What a method does on a resource, and the right that it takes; None: nobody is asked for a token."""

    handler: Handler
    right: Right | None
    changes: bool = False


OPERATIONS: Final[Mapping[str, Mapping[str, Operation]]] = {
    "/v1/messages": {
        "POST": Operation(messages.schedule, "schedule", changes=True),
        "GET": Operation(messages.list_page, "read"),
    },
    "/v1/messages/{id}": {
        "GET": Operation(messages.look, "read"),
        "PUT": Operation(messages.replace, "schedule", changes=True),
        "DELETE": Operation(messages.cancel, "schedule", changes=True),
        "PATCH": Operation(messages.move, "schedule", changes=True),
    },
    "/v1/batches": {"POST": Operation(batches.store, "schedule", changes=True)},
    "/v1/cancellations": {"POST": Operation(messages.cancel_many, "schedule", changes=True)},
    "/v1/load": {"GET": Operation(probes.load, "read")},
    "/v1/status": {"GET": Operation(probes.status, "read")},
    "/v1/topics": {"GET": Operation(topics.list_page, "read")},
    "/v1/topics/{topic}": {"GET": Operation(topics.look, "read")},
    "/v1/topics/{topic}/pause": {
        "PUT": Operation(topics.pause, "operate", changes=True),
        "DELETE": Operation(topics.resume, "operate", changes=True),
    },
    "/v1/dead": {"GET": Operation(dead.list_page, "read")},
    "/v1/dead/redrive": {"POST": Operation(dead.redrive, "operate", changes=True)},
    "/v1/dead/purge": {"POST": Operation(dead.purge, "operate", changes=True)},
    "/livez": {"GET": Operation(probes.live, None)},
    "/readyz": {"GET": Operation(probes.ready, None)},
    "/metrics": {"GET": Operation(probes.metrics, "read")},
    "/openapi.json": {"GET": Operation(probes.contract, None)},
    "/problems/{word}": {"GET": Operation(probes.explain, None)},
}


class _Resource:
    """What is behind one route: an ASGI application that leaves its answer in the scope."""

    def __init__(self, app: "App", template: str, operations: Mapping[str, Operation]) -> None:
        self._app = app
        self._template = template
        self._operations = operations

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange: _Exchange = scope["duetime"]
        exchange.route = self._template
        call = exchange.call
        call.path = scope["path_params"]
        operation = self._operations.get("GET" if call.method == "HEAD" else call.method)
        if operation is None:
            allowed = {"Allow": ", ".join(self._operations)}
            raise Problem("wrong_method", f"It takes {allowed['Allow']}.", headers=allowed, closes=True)
        if operation.right is not None:
            exchange.caller = self._app.access.check_caller(call.headers, operation.right).name
        exchange.response = await operation.handler(self._app.api, call)


@dataclass(slots=True)
class _Exchange:
    """A request, and what becomes of it."""

    call: Call
    route: str = NO_ROUTE
    caller: str = ""
    response: Response | None = None


class App:
    """The ASGI application."""

    def __init__(self, api: Api, access: Access) -> None:
        self.api = api
        self.access = access
        self._router = Router(self._routes(), redirect_slashes=False, default=_no_route)

    def _routes(self) -> Sequence[Route]:
        is_read_only = self.api.settings.api.read_only
        routes = []
        for template, all_operations in OPERATIONS.items():
            operations = {
                method: each for method, each in all_operations.items() if not (is_read_only and each.changes)
            }
            if operations:
                routes.append(Route(template, _Resource(self, template, operations)))
        return routes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        started_ms = self.api.clock.monotonic_ms()
        exchange = _Exchange(Call(scope, receive, self.api.settings.api, self.api.reading))
        scope["duetime"] = exchange
        try:
            self.access.check_source(exchange.call.headers)
            await self._router(scope, receive, send)
        except ClientGone:
            exchange.call.release()
            return
        except Exception as exc:
            exchange.response = problem_answer(self._problem_of(exc, exchange))
        response = exchange.response
        assert response is not None
        ms = self.api.clock.monotonic_ms() - started_ms
        self.api.meters.count(exchange.call.method, exchange.route, response.status_code, ms / 1000)
        log.info(
            "%s %s %d %.1f ms %s",
            exchange.call.method,
            exchange.route,
            response.status_code,
            ms,
            exchange.caller or "-",
        )
        exchange.call.release()
        await response(scope, receive, send)

    def _problem_of(self, error: Exception, exchange: _Exchange) -> Problem:
        problem = problem_of(error)
        if problem is None:
            log.error("%s %s failed", exchange.call.method, exchange.route, exc_info=error)
            return Problem("internal", "The log of the server says more.")
        if problem.status == 500:
            log.error("%s %s: %s", exchange.call.method, exchange.route, error)
        return problem


async def _no_route(scope: Any, receive: Any, send: Any) -> None:
    raise Problem("not_found", "The document /openapi.json lists what there is.", closes=True)
