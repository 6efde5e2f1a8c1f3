"""What is kept between forward passes: composition factors beside keys and values, and segment memory."""
