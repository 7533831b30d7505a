"""Ports: BudgetFormer behind other libraries' faces. They import the package; nothing of the package imports them."""
