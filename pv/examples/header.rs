//! Prints the C header of the paravirtual interface.

fn main() {
    print!("{}", pv::header());
}
