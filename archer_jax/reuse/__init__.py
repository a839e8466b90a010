"""What is kept between steps, when it is renewed, and which rows are fed. One method a module, found by its name."""
