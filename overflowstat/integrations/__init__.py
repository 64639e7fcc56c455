"""Where models are trained by others' loops: `.transformers` and `.lightning`, each imported only when asked for."""
