"""How Sphinx builds this folder: ``python -m sphinx -W --keep-going -b html docs docs/_build/html``.

Its autodoc reads the docstrings that mypy and the tests see, its strict build checks the links, and it needs no
network.
"""

import fa2patch

project = "fa2patch"
author = copyright = "the fa2patch maintainers"
version = release = fa2patch.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
nitpicky = True
# No inventories of other projects, because the build needs no network; and types that users only pass on.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!fa2patch\.).*"),
    (r"py:class", r"fa2patch\.(_types|packing\.(passes|units)|patch\.model_plan|upstream)\..*"),
]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_use_legacy_class_based = False
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 100

myst_heading_anchors = 3
smartquotes_action = "qe"  # two dashes are an option of a command

copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"fa2patch {release}"
html_baseurl = "https://fa2patch.github.io/fa2patch/"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["narrow.css"]  # else a phone cuts the tables' code
html_extra_path = ["../compat_matrix/matrix.html"]  # it links to the evidence in the repository
html_theme_options = {
    "source_repository": "https://github.com/fa2patch/fa2patch/",
    "source_branch": "main",
    "source_directory": "docs/",
}
