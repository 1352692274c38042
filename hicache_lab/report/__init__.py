"""Reports people can edit and send: Markdown, and one HTML file that opens offline."""

from hicache_lab.report.document import Document
from hicache_lab.report.postmortem import Postmortem, postmortem, write_report
from hicache_lab.report.runs import run_report

__all__ = ["Document", "Postmortem", "postmortem", "run_report", "write_report"]
