"""A report as one HTML page that needs no other file, no server and no script.

In: a ``Report``. Out: text. The same report gives the same bytes: the page holds no time of its making.

Example::

    write_file(Path("report.html"), render_page(make_report(plan, sources)))
"""

from __future__ import annotations

from functools import cache

import jinja2

from lynnc.report.contents import Report
from lynnc.report.wording import number_text, pairs_text, percent, time_text
from lynnc.units import amount, size
from lynnc.version import VERSION

TEMPLATE = "page.html.jinja"


def render_page(report: Report) -> str:
    """The whole page."""
    return environment().get_template(TEMPLATE).render(report=report, version=VERSION)


@cache
def environment() -> jinja2.Environment:
    """Jinja with the page's filters; what is not defined is an error, and all text is escaped."""
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("lynnc.report", ""),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(
        size=size, amount=amount, time=time_text, percent=percent, knobs=pairs_text, number=number_text
    )
    return found
