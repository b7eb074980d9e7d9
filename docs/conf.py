"""The site: `python -m sphinx -W -b html docs docs/_build/html`. No page that it builds needs a network."""

import sys
from pathlib import Path

import masksafe

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "masksafe"
author = "the masksafe contributors"
project_copyright = "the masksafe contributors, Apache-2.0"
version = release = masksafe.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "mathml",
    "docstrings",
    "signatures",
]
exclude_patterns = ["_build"]
nitpicky = False  # the docstrings name functions of JAX and optax, whose sites a build without a network cannot look up

# Markdown.
myst_enable_extensions = ["dollarmath", "attrs_inline", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the notebook has its outputs
nb_merge_streams = True

# Docstrings.
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # the signature has them
napoleon_custom_sections = [("Coming from another library", "Notes")]
add_module_names = False
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"  # "On this page" lists the functions of a page by their names

# The copy button of an example takes its code alone.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

# Looks.
html_theme = "furo"
html_title = f"masksafe {version}"
html_static_path = ["_static"]
html_css_files = ["masksafe.css"]
html_show_sphinx = False
pygments_dark_style = "github-dark"
html_copy_source = html_show_sourcelink = False
