//! Tests the whole card through its registers and apertures, using a small driver.

mod ahead;
mod channels;
mod driver;
mod errors;
mod fuzz;
mod kernels;
mod malformed;
mod posted;
mod profile;
mod registers;
mod saved;
mod threaded;
mod timing;
