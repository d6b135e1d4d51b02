//! Tests of the header in the repository, and of the conversion of names.

use super::*;

#[test]
fn the_header_in_the_repository_is_that_of_the_interface() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../guest/pv-module/gpu_mediator_abi.h");
    let kept = std::fs::read_to_string(path).unwrap_or_default();
    let command = "cargo run -p pv --example header > guest/pv-module/gpu_mediator_abi.h";
    assert!(kept == header(), "the header does not match the interface; update it with: {command}");
}

#[test]
fn links_become_c_names() {
    let cases = [
        ("One of [`Status`].", "", "One of GMPV_RESULT_*."),
        ("[`Status::NotBegun`] or [`share::mode`].", "", "GMPV_RESULT_NOT_BEGUN or GMPV_SHARE_MODE_*."),
        ("[`BatchHeader`]", "", "struct gmpv_batch_header"),
        ("Read: [`super::SIGNATURE`].", "register", "Read: GMPV_SIGNATURE."),
        ("Before [`STATUS`] of `this`.", "register", "Before GMPV_REGISTER_STATUS of `this`."),
        ("From [`Capability::offset`]", "", "From offset of struct gmpv_capability"),
        ("Its [`mode`](super::mode). More.", "share::control", "Its GMPV_SHARE_MODE_*."),
        ("[`op::X`](super::super::op::QUERY) of 1.2, 2.7", "share::control", "GMPV_OP_QUERY of 1.2, 2.7"),
    ];
    for (doc, module, expected) in cases {
        assert_eq!(sentence(&[doc], module), expected);
    }
}

#[test]
fn no_link_of_the_interface_is_left_over() {
    let text = header();
    let left: Vec<_> = text.lines().filter(|line| line.contains("::") || line.contains("[`")).collect();
    assert_eq!(left, Vec::<&str>::new());
}

#[test]
fn long_comments_are_broken() {
    let mut text = String::new();
    comment(&mut text, "\t", "short");
    comment(&mut text, "\t", &"word ".repeat(30));
    assert!(text.starts_with("\t/* short */\n\t/*\n\t * word"));
    assert!(text.lines().all(|line| line.len() <= MAX_COLUMNS + 4));
}
