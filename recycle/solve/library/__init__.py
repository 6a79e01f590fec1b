"""Plan libraries: filled for many failure vectors, and refreshed when times have changed."""
