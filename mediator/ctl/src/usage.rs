//! Parses the command line, or reports an invalid one in the requested output format.

use std::ffi::OsString;
use std::io::Write;

use clap::FromArgMatches;

use super::colours::Colours;
use super::{Arguments, Code, Form, examples, json};
use api::ErrorCode;

/// Parses a command line.
pub(super) fn parse(words: &[OsString]) -> Result<Arguments, clap::Error> {
    let mut command = examples::command();
    let matches = command.try_get_matches_from_mut(words)?;
    Arguments::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

/// Returns true if the command line, which may be invalid, requests JSON.
fn asks_for_json(words: &[OsString]) -> bool {
    let own = || words.iter().take_while(|word| *word != "--");
    let pairs = own().zip(own().skip(1));
    own().any(|word| ["--json", "--output=json", "-ojson", "-o=json"].iter().any(|asks| word == *asks))
        || pairs.into_iter().any(|(option, form)| (option == "--output" || option == "-o") && form == "json")
}

/// Prints the reason why a command line is invalid, or the requested help.
pub(super) fn show(
    error: &clap::Error,
    words: &[OsString],
    out: &mut dyn Write,
    err: &mut dyn Write,
    colours: Colours,
) -> Code {
    let styled = |is_on: bool| if is_on { error.render().ansi().to_string() } else { error.render().to_string() };
    if !error.use_stderr() {
        let _ = write!(out, "{}", styled(colours.out));
        return Code::Good;
    }
    let text = error.render().to_string();
    let _ = match asks_for_json(words) {
        false => write!(err, "{}", styled(colours.err)),
        true => {
            let (what, rest) = text.split_once("\n\n").unwrap_or((&text, ""));
            let line = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
            let error = line(what.strip_prefix("error: ").unwrap_or(what));
            let error = api::Error { code: ErrorCode::Invalid, error, what_to_do: line(rest) };
            writeln!(err, "{}", Form::Json.shown(json(&error).trim_end()))
        }
    };
    Code::Usage
}
