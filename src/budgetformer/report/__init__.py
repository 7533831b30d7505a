"""Report: tables, figures and pictures, drawn from numbers that were measured elsewhere."""

from budgetformer.report.tables import cells, curve, draw_figures, markdown_table, notes, table, ways, write_report

__all__ = ["cells", "curve", "draw_figures", "markdown_table", "notes", "table", "ways", "write_report"]
