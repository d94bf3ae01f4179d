"""From a request to its handler, of the API or of a page: host and origin, route, right, answer, count, log."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.routing import Route, Router

from pipeline.web import actions, batches, dead, messages, pages, probes, topics
from pipeline.web.access import Access, Right
from pipeline.web.api import Api, problem_of
from pipeline.web.call import Call, ClientGone, problem_answer
from pipeline.web.problems import Problem
from pipeline.web.site import Site, Visitor

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
    "/messages": {"POST": Operation(messages.schedule, "schedule", changes=True)},
    "/status": {"GET": Operation(probes.status, "read")},
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


PageHandler = Callable[[Site, Call, Visitor], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Page:
    """A page, or what its form does, and the right that it takes; what ``changes`` something is also what asks before that."""

    handler: PageHandler
    right: Right | None
    changes: bool = False


PAGES: Final[Mapping[str, Mapping[str, Page]]] = {
    "/": {"GET": Page(pages.overview, "read")},
    "/login": {"POST": Page(actions.log_in, None)},
    "/logout": {"POST": Page(actions.log_out, None)},
    "/messages": {"GET": Page(pages.list_messages, "read")},
    "/messages/{id}": {
        "GET": Page(pages.show_message, "read"),
        "POST": Page(actions.change_message, "schedule", changes=True),
    },
    "/find": {"GET": Page(pages.find, "read")},
    "/topics": {"GET": Page(pages.list_topics, "read")},
    "/topics/{topic}": {
        "GET": Page(pages.show_topic, "read"),
        "POST": Page(actions.pause, "operate", changes=True),
    },
    "/dead": {"GET": Page(pages.list_dead, "read")},
    "/letter": {"GET": Page(pages.show_letter, "read")},
    "/loops": {"GET": Page(pages.loops, "read")},
    "/try": {
        "GET": Page(actions.show_try, "schedule", changes=True),
        "POST": Page(actions.schedule, "schedule", changes=True),
    },
    "/change/messages": {
        "GET": Page(actions.confirm_messages, "schedule", changes=True),
        "POST": Page(actions.change_messages, "schedule", changes=True),
    },
    "/change/dead": {
        "GET": Page(actions.confirm_dead, "operate", changes=True),
        "POST": Page(actions.change_dead, "operate", changes=True),
    },
    "/live": {"GET": Page(pages.live, "read")},
    "/static/{name}": {"GET": Page(pages.static, None)},
}


class _Resource:
    """What is behind one route: an ASGI application that leaves its answer in the scope."""

    def __init__(self, app: "App", template: str, operations: Mapping[str, Operation]) -> None:
        self._app = app
        self._template = template
        self.operations = operations

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange: _Exchange = scope["duetime"]
        exchange.route = self._template
        call = exchange.call
        call.path = scope["path_params"]
        self._app.access.check_source(call.headers)
        operation = _operation_of(self.operations, call.method, [*self.operations])
        if operation.right is not None:
            exchange.caller = self._app.access.check_caller(call.headers, operation.right, call.address).name
        exchange.response = await operation.handler(self._app.api, call)


class _Page:
    """The same of a page."""

    def __init__(self, app: "App", template: str, operations: Mapping[str, Page]) -> None:
        self._site = app.site
        self._template = template
        self.operations = operations
        self.allowed = [*operations]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        site, exchange = self._site, scope["duetime"]
        exchange.route, exchange.is_page = self._template, True
        call = exchange.call
        call.path = scope["path_params"]
        page = _operation_of(self.operations, call.method, self.allowed)
        if not site.access.check_visit(call.headers, changes=call.method not in ("GET", "HEAD")):
            exchange.response = site.again(call)
            return
        visitor = await site.visitor(call) if page.right is not None else site.stranger(call)
        exchange.visitor = visitor
        if self._template == "/" and (token := call.quiet_parameters().get("token")):
            exchange.response = await site.enter(call, visitor, token)
            return
        if page.right is not None:
            site.check(visitor, page.right)
        exchange.caller = visitor.name
        exchange.response = await page.handler(site, call, visitor)


class _Shared:
    """A path of a page, of which some methods belong to the API."""

    def __init__(self, resource: _Resource, page: _Page) -> None:
        self._resource = resource
        self._page = page
        page.allowed = [*page.operations, *resource.operations]
        self.operations: Mapping[str, Operation | Page] = {**page.operations, **resource.operations}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        method = scope["duetime"].call.method
        if method in self._resource.operations:
            await self._resource(scope, receive, send)
            return
        await self._page(scope, receive, send)


AnyOperation = TypeVar("AnyOperation", Operation, Page)


def _operation_of(operations: Mapping[str, AnyOperation], method: str, allowed: Sequence[str]) -> AnyOperation:
    """Return what a method does; ``allowed`` are those of the path.

    Raises:
        Problem: ``wrong_method``.
    """
    operation = operations.get("GET" if method == "HEAD" else method)
    if operation is None:
        methods = ", ".join([*allowed, "HEAD"] if "GET" in allowed else allowed)
        raise Problem("wrong_method", f"It takes {methods}.", headers={"Allow": methods}, closes=True)
    return operation


@dataclass(slots=True)
class _Exchange:
    """A request, and what becomes of it."""

    call: Call
    route: str = NO_ROUTE
    caller: str = ""
    response: Response | None = None
    is_page: bool = False
    visitor: Visitor | None = None


class App:
    """The ASGI application."""

    def __init__(self, api: Api, access: Access) -> None:
        self.api = api
        self.access = access
        self.site = Site(api, access)
        self._router = Router(self._routes(), redirect_slashes=False, default=self._no_route)

    def _routes(self) -> Sequence[Route]:
        is_read_only = self.api.settings.api.read_only

        def allowed(operations: Mapping[str, AnyOperation]) -> dict[str, AnyOperation]:
            return {method: each for method, each in operations.items() if not (is_read_only and each.changes)}

        endpoints: dict[str, Any] = {
            template: _Resource(self, template, allowed(each)) for template, each in OPERATIONS.items()
        }
        for template, each in PAGES.items():
            page = _Page(self, template, allowed(each))
            also = endpoints.get(template)
            endpoints[template] = _Shared(also, page) if also and also.operations else page
        return [Route(template, endpoint) for template, endpoint in endpoints.items() if endpoint.operations]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        started_ms = self.api.clock.monotonic_ms()
        exchange = _Exchange(Call(scope, receive, self.api.settings.api, self.api.reading))
        call = exchange.call
        call.address = self.access.address_of(call.peer, call.forwarded)
        scope["duetime"] = exchange
        try:
            await self._router(scope, receive, send)
        except ClientGone:
            exchange.call.release()
            return
        except Exception as exc:
            problem = self._problem_of(exc, exchange)
            exchange.response = (
                self._page_of(problem, exchange) if exchange.is_page and call.wants_page else problem_answer(problem)
            )
        response = exchange.response
        assert response is not None
        response.headers["X-Request-Id"] = call.request_id
        ms = self.api.clock.monotonic_ms() - started_ms
        self.api.meters.count(exchange.call.method, exchange.route, response.status_code, ms / 1000)
        is_look = exchange.is_page and exchange.call.method in ("GET", "HEAD") and response.status_code < 400
        log.log(
            logging.DEBUG if is_look else logging.INFO,
            "%s %s %d %.1f ms %s %s %s",
            exchange.call.method,
            exchange.route,
            response.status_code,
            ms,
            exchange.caller or "-",
            call.address,
            call.request_id,
        )
        exchange.call.release()
        await response(scope, receive, send)

    def _page_of(self, problem: Problem, exchange: _Exchange) -> Response:
        return self.site.refuse(problem, exchange.call, exchange.visitor or self.site.stranger(exchange.call))

    def _problem_of(self, error: Exception, exchange: _Exchange) -> Problem:
        problem = problem_of(error, changes=exchange.call.method not in ("GET", "HEAD"))
        if problem is None:
            log.error("%s %s failed", exchange.call.method, exchange.route, exc_info=error)
            return Problem("internal", "The log of the server says more.")
        if problem.status == 500:
            log.error("%s %s: %s", exchange.call.method, exchange.route, error)
        return problem

    async def _no_route(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = scope["duetime"]
        exchange.is_page = b"text/html" in exchange.call.headers.get(b"accept", b"")  # a browser
        self.access.check_source(exchange.call.headers)
        raise Problem("not_found", "The document /openapi.json lists what there is.", closes=True)
