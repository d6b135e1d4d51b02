//! Tests that the page for operators and the example in the package mention only existing options and arguments.

use std::fs;
use std::path::Path;

use spank_gpu_mediator::options::{Arguments, Given, OPTIONS};

fn file(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name)).unwrap()
}

#[test]
fn page_has_a_row_for_each_option_and_argument() {
    let page = file("docs/guides/slurm.md");
    for option in OPTIONS {
        let name = option.name.to_str().unwrap();
        let value = option.value.map(|value| format!("={}", value.to_str().unwrap())).unwrap_or_default();
        assert!(
            page.contains(&format!("| `--{name}{value}` |")),
            "docs/guides/slurm.md has no row for --{name}{value}"
        );
    }
    let refused = Arguments::read(&["nothing=1"]).unwrap_err();
    let keys = refused.split_once("one of ").unwrap().1;
    for key in keys.split(", ") {
        assert!(page.contains(&format!("| `{key}` |")), "docs/guides/slurm.md has no row for {key}");
    }
    assert!(keys.split(", ").count() > 5, "{refused}");
}

#[test]
fn examples_are_arguments() {
    let read = |line: &str| {
        let words: Vec<_> = line.split_whitespace().filter(|word| word.contains('=')).collect();
        assert!(!words.is_empty(), "{line}");
        Arguments::read(&words).unwrap()
    };
    let (example, page) = (file("packaging/slurm/plugstack.conf"), file("docs/guides/slurm.md"));
    let line = example.lines().find(|line| line.starts_with("required ")).unwrap();
    assert_eq!(read(line), Arguments::default());
    let health = page.lines().find(|line| line.contains("exec gpu-mediator-slurm health")).unwrap();
    assert_eq!(read(health), Arguments::default());
}

#[test]
fn jobs_in_guide_get_requested_share() {
    let page = file("docs/guides/slurm.md");
    let mut given = Vec::new();
    for line in page.lines().map(str::trim).filter(|line| line.starts_with("sbatch ")) {
        let mut job = Given::new();
        for word in line.split(' ').filter(|word| word.starts_with("--")) {
            let (name, value) = word[2..].split_once('=').unwrap_or((&word[2..], ""));
            let number = OPTIONS.iter().position(|option| option.name.to_str() == Ok(name));
            assert!(number.is_some() || ["gres", "wrap"].contains(&name), "no option of ours, nor of Slurm: {line}");
            number.into_iter().for_each(|number| job.take(number, value).unwrap());
        }
        given.push((job.memory_mib, job.weight));
    }
    assert_eq!(given, [(None, None), (Some(40 << 10), Some(300))]);
}
