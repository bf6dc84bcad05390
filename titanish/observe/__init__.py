"""What a run tells about itself: metrics, and the places that they are written to."""
