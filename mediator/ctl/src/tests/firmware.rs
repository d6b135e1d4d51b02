//! Tests firmware commands without a daemon, from importing a file to the image that a card loads.

use super::*;
use ::firmware::{Image, Store};
use nvspec::falcon::Falcon;

const NOWHERE: &str = "/nonexistent/admin.sock";

#[test]
fn images_are_imported_approved_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    let state = ["--state-dir", folder.path().to_str().unwrap()];
    let run = |arguments: &[&str]| ctl_at(NOWHERE, &[&["card", "firmware"], arguments, &state[..]].concat());
    assert_eq!(run(&["list"]).out, "no firmware\n");
    let ran = run(&["import", "--stand-in"]);
    assert_eq!((ran.code, ran.out.matches("candidate").count()), (Code::Good, 4), "{}", ran.err);
    let digests: Vec<String> = Falcon::ALL.map(|falcon| Image::stand_in(falcon).digest().to_string()).to_vec();
    let mut arguments = vec!["approve"];
    arguments.extend(digests.iter().map(|digest| &digest[..16]));
    assert_eq!(run(&arguments).out.matches("approved").count(), 4);
    assert!(Store::within(folder.path()).approved().unwrap().is_ok());
    let ran = run(&["remove", &digests[0]]);
    assert_eq!((ran.code, ran.out), (Code::Good, format!("removed {} of fecs\n", digests[0])));
    let ran = run(&["remove", &digests[0]]);
    assert_eq!(ran.code, Code::NotFound);
    assert!(ran.err.contains("0 images have a digest that begins with"), "{}", ran.err);
}

#[test]
fn file_that_is_no_image_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("fuc409c");
    std::fs::write(&file, b"something else").unwrap();
    let (file, state) = (file.to_str().unwrap(), folder.path().to_str().unwrap());
    let ran = ctl_at(NOWHERE, &["card", "firmware", "import", file, "--state-dir", state]);
    assert_eq!(ran.code, Code::Usage);
    assert!(ran.err.contains(file) && ran.err.contains("this is not an image of falcon firmware"), "{}", ran.err);
}
