"""The process that renders chat templates, so that a hostile template can harm only this process.

It is run as a file and imports nothing of this package. It reads pickles of a source, its variables and the limits, and
answers each with a line of JSON: the text, or an error. A template sees only JSON values, in Jinja's sandbox. A
template that takes too much time ends the process.
"""

import faulthandler
import functools
import json
import pickle
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

sys.path += sys.argv[1:]  # the caller's, after this interpreter's own

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

if sys.platform != "win32":  # on Windows no limit of memory is set
    import resource


def render(source: str, variables: dict[str, Any], most_characters: int) -> dict[str, str]:
    """Renders a template; returns its text, or an error message."""
    try:
        template = compile_template(source)
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"is malformed at line {error.lineno}: {error.message}"}
    except (RecursionError, MemoryError, SyntaxError):  # Python's own parser raises the latter two
        return {"error": "is nested too deeply"}
    except ValueError as error:  # a number of thousands of digits
        return {"error": f"is malformed: {error}"}
    try:
        text = template.render(variables)
    except RecursionError:
        return {"error": "recurses without end"}
    except MemoryError:
        return {"error": "takes too much memory"}
    except Exception as error:  # noqa: BLE001  of any kind: the template raises it
        return {"error": f"refused the messages: {error}"}
    if len(text) > most_characters:
        return {"error": f"makes a text of more than {most_characters:,} characters"}
    return {"text": text}


@functools.lru_cache(maxsize=8)
def compile_template(source: str) -> jinja2.Template:
    """Compiles a template in the environment that transformers gives templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationTag, jinja2.ext.loopcontrols],
        optimized=False,  # else constants are computed here, and their errors look like a malformed template
    )
    environment.filters["tojson"] = _dump_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment.from_string(source)


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}`, which marks the assistant's words and renders as its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Turns the tag into a call whose result is the rendered body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _dump_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def main() -> None:
    """Renders until standard input ends."""
    if sys.platform != "win32":  # the parent may have ignored or blocked it
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    while True:
        try:
            source, variables, seconds, most_bytes, most_characters = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        if sys.platform != "win32":
            _, most = resource.getrlimit(resource.RLIMIT_AS)
            limit = most_bytes if most == resource.RLIM_INFINITY else min(most_bytes, most)
            resource.setrlimit(resource.RLIMIT_AS, (limit, most))
        set_alarm(seconds)
        answer = render(source, variables, most_characters)
        set_alarm(0)
        print(json.dumps(answer), flush=True)


def set_alarm(seconds: float) -> None:
    """Ends the process after some seconds, whatever it does then; 0 cancels this."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_REAL, seconds)  # the kernel sends SIGALRM, which nothing here catches
    elif seconds:
        faulthandler.dump_traceback_later(seconds, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
