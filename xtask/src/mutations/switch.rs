//! Combines several mistakes in one build. A function with mistakes has its correct body and one body per mistake, and
//! an environment variable selects one of them.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Result, ensure};

use super::Mutation;
use super::place::body_around;

/// Environment variable with the name of the mistake to enable.
pub const VARIABLE: &str = "GPU_MEDIATOR_MUTATION";

/// A source text with switches.
pub struct Switched<'m> {
    pub text: String,
    /// Line ranges, counted from 1, each with the mistakes whose switches it contains.
    pub switches: Vec<(Range<usize>, Vec<&'m str>)>,
}

/// Returns the location of a mistake's text, which must occur exactly once in the source.
pub fn place(text: &str, mutation: &Mutation) -> Result<Range<usize>> {
    let Mutation { file, from, .. } = mutation;
    let count = text.matches(from.as_str()).count();
    ensure!(count == 1, "{file} has {count} places like `{from}`, one is expected");
    let start = text.find(from.as_str()).unwrap_or_default();
    Ok(start..start + from.len())
}

/// Inserts mistakes into a source, each with a switch. Omits mistakes for which this is impossible.
pub fn switched<'m>(text: &str, mutations: &[&'m Mutation]) -> Result<Switched<'m>> {
    // Group the mistakes by the start of the enclosing body.
    let mut bodies: BTreeMap<usize, (Range<usize>, Vec<&'m Mutation>)> = BTreeMap::new();
    for mutation in mutations {
        let Some(body) = body_around(text, &place(text, mutation)?).filter(|_| mutation.file.ends_with(".rs")) else {
            continue;
        };
        let apart = |other: &Range<usize>| other.end <= body.start || body.end <= other.start;
        if bodies.values().all(|(other, _)| *other == body || apart(other)) {
            bodies.entry(body.start).or_insert_with(|| (body, Vec::new())).1.push(mutation);
        }
    }
    let mut switched = Switched { text: String::new(), switches: Vec::new() };
    let mut done = 0;
    for (body, mutations) in bodies.into_values() {
        let right = &text[body.clone()];
        switched.text.push_str(&text[done..body.start]);
        let first = line(&switched.text);
        for Mutation { name, from, to, .. } in &mutations {
            let wrong = right.replacen(from.as_str(), to, 1);
            switched.text.push_str(&format!(" if {} {{{wrong}}} else", condition(name)));
        }
        switched.text.push_str(&format!(" {{{right}}}"));
        let names = mutations.iter().map(|mutation| mutation.name.as_str()).collect();
        switched.switches.push((first..line(&switched.text) + 1, names));
        done = body.end;
    }
    switched.text.push_str(&text[done..]);
    Ok(switched)
}

/// Returns the number of the line, counted from 1, on which a text ends.
fn line(text: &str) -> usize {
    text.matches('\n').count() + 1
}

/// Returns an expression that is true if the mistake is enabled. The expression is evaluated often, so it reads the
/// environment only once.
fn condition(name: &str) -> String {
    format!(
        "{{ static MAKES: ::std::sync::OnceLock<bool> = ::std::sync::OnceLock::new(); \
         *MAKES.get_or_init(|| ::std::env::var_os(\"{VARIABLE}\").is_some_and(|name| name == \"{name}\")) }}"
    )
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn mutation(name: &str, from: &str, to: &str) -> Mutation {
        let [name, from, to] = [name, from, to].map(str::to_owned);
        let (what, tests) = (String::new(), String::new());
        Mutation { name, what, package: "p".into(), file: "p/src/lib.rs".into(), from, to, tests }
    }

    #[test]
    fn mistakes_of_one_function_share_its_right_body() {
        let mutations = [
            mutation("first", "x < 8", "x < 9"),
            mutation("second", "x + 1", "x"),
            mutation("outside", "u32 = 8", "u32 = 9"),
            mutation("other", "{ 3 }", "{ 4 }"),
        ];
        let text =
            "const C: u32 = 8;\nfn a(x: u32) -> u32 {\n    assert!(x < 8);\n    x + 1\n}\nfn b() -> u32 { { 3 } }\n";
        let Switched { text, switches } = switched(text, &mutations.each_ref()).unwrap();
        let asked = |name: &str| text.matches(&format!("name == \"{name}\"")).count();
        assert_eq!(["first", "second", "outside", "other"].map(asked), [1, 1, 0, 1]);
        assert!(text.contains("{\n    assert!(x < 9);\n    x + 1\n} else if"), "{text}");
        assert!(
            text.contains("{\n    assert!(x < 8);\n    x\n} else {\n    assert!(x < 8);\n    x + 1\n}}\n"),
            "{text}"
        );
        assert!(text.ends_with("{ { 4 } } else { { 3 } }}\n"), "{text}");
        assert_eq!(switches, [(2..12, vec!["first", "second"]), (12..13, vec!["other"])]);
        assert!(text.starts_with("const C: u32 = 8;\n"));
    }

    #[test]
    fn a_mistake_with_two_places_is_an_error() {
        let mutations = [mutation("two", "x", "y")];
        assert!(switched("fn a() { x }\nfn b() { x }", &mutations.each_ref()).is_err());
    }
}
