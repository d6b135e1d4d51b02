//! The stored state of a running daemon. The state is read when the daemon starts, and written after each change.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::store::{Store, StoreError};
use super::{Live, State, VERSION};
use config::Config;
use config::check::{self, Key};

/// Reason why the daemon cannot start with the stored state.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum StateError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{}:{line}:{column}: {what}; {ADVICE}", path.display())]
    Damaged { path: PathBuf, line: usize, column: usize, what: String },
    #[error("{}: {what}; {ADVICE}", path.display())]
    Unusable { path: PathBuf, what: String },
    #[error(
        "{} conflicts with the configuration file; correct this, or start once with --ignore-state:\n{}",
        path.display(),
        mistakes.join("\n")
    )]
    Misfit { path: PathBuf, mistakes: Vec<String> },
}

/// Advice for a file that cannot be used.
const ADVICE: &str = "replace it with a good copy, or start once with --ignore-state, which renames it";

/// The store of changes, if the configuration names a folder for it.
#[derive(Debug, Default)]
pub struct OverrideStore {
    /// The configuration file as it was at the daemon's start.
    file: Config,
    store: Option<Store>,
    /// Content of the file, so that only changed content is written; `None` if unknown.
    written: Option<State>,
}

impl OverrideStore {
    /// Reads the stored changes from the folder that the configuration names. Returns the configuration with the
    /// changes. With `ignore`, the file with the stored changes is renamed and not used.
    ///
    /// # Errors
    /// Returns an error if the stored changes cannot be read, are damaged, or do not match the configuration. The
    /// function never guesses values.
    pub fn open(file: Config, ignore: bool) -> Result<(Config, Self), StateError> {
        let Some(folder) = &file.daemon.state_dir else {
            tracing::info!(
                "no `state_dir` is configured: changes of VMs and limits at run time are lost when the daemon ends"
            );
            return Ok((file.clone(), Self { file, store: None, written: None }));
        };
        let store = Store::open(folder)?;
        if ignore && let Some(path) = store.set_aside()? {
            tracing::warn!(path = %path.display(), "the state file is renamed, as requested");
        }
        let written = match store.read()? {
            None => State::default(),
            Some(text) => parsed(&text, &store.path())?,
        };
        let config = applied(&written, &file, &store.path())?;
        let mut override_store = Self { file, store: Some(store), written: Some(written) };
        // Changes that no longer apply must not reappear when the file is edited again.
        override_store.keep(&Live::from_config(&config))?;
        Ok((config, override_store))
    }

    /// Takes over the store of another daemon, which reported `state` as its content. `lock` is the lock of the
    /// daemon's folder. Returns the configuration with the changes.
    ///
    /// # Errors
    /// Returns an error if the stored changes do not match the configuration.
    pub fn handed(file: Config, state: &str, lock: Option<File>) -> Result<(Config, Self), StateError> {
        let folder = file.daemon.state_dir.clone();
        let place = folder.clone().unwrap_or_else(|| PathBuf::from("what was changed at run time"));
        let written = parsed(state.as_bytes(), &place)?;
        let store = match (&folder, lock) {
            (None, _) => None,
            (Some(folder), Some(lock)) if Store::is_lock_of(&lock, folder) => Some(Store::with_lock(folder, lock)),
            // The other daemon had no folder, or a different folder.
            (Some(folder), _) => Some(Store::open(folder)?),
        };
        let config = applied(&written, &file, &place)?;
        // The other daemon may not have written the state.
        Ok((config, Self { file, store, written: None }))
    }

    /// Returns the lock of the folder, if it exists.
    pub fn lock(&self) -> Option<&File> {
        self.store.as_ref().map(Store::lock)
    }

    /// Returns the differences from the configuration file, in the form in which they are stored.
    ///
    /// # Errors
    /// Returns an error if a value cannot be written as JSON.
    pub fn state(&self, now: &Live) -> Result<String, StateError> {
        let unusable = |what| StateError::Unusable { path: PathBuf::from("what was changed at run time"), what };
        let state = State::between(&self.file, now).map_err(unusable)?;
        serde_json::to_string(&state).map_err(|error| unusable(error.to_string()))
    }

    /// Writes the current settings, unless they are already written.
    ///
    /// # Errors
    /// Returns an error if the settings cannot be written. The next change retries the write.
    pub fn keep(&mut self, now: &Live) -> Result<(), StateError> {
        let Some(store) = &self.store else { return Ok(()) };
        let unusable = |what| StateError::Unusable { path: store.path(), what };
        let state = State::between(&self.file, now).map_err(unusable)?;
        if self.written.as_ref() == Some(&state) {
            return Ok(());
        }
        let mut text = serde_json::to_string_pretty(&state).map_err(|error| unusable(error.to_string()))?;
        text.push('\n');
        store.write(text.as_bytes())?;
        self.written = Some(state);
        Ok(())
    }
}

/// Returns the configuration file with the changes of a state, which was read from `path`.
fn applied(state: &State, file: &Config, path: &Path) -> Result<Config, StateError> {
    let unusable = |what| StateError::Unusable { path: path.to_owned(), what };
    let (config, forgotten) = state.applied(file).map_err(unusable)?;
    for what in &forgotten {
        tracing::warn!("no longer saved: {what}");
    }
    let mistakes = check::config(&config);
    if mistakes.is_empty() {
        return Ok(config);
    }
    let named = mistakes.iter().map(|mistake| named(&config, &mistake.key, &mistake.what));
    Err(StateError::Misfit { path: path.to_owned(), mistakes: named.collect() })
}

/// Parses the state in a file.
pub(super) fn parsed(text: &[u8], path: &Path) -> Result<State, StateError> {
    // A state of another version may have other keys, so the version is reported instead of the keys.
    #[derive(serde::Deserialize)]
    struct Versioned {
        version: u32,
    }
    let damaged = |error: serde_json::Error| {
        let (line, column) = (error.line(), error.column());
        let what = error.to_string();
        let what = what.split(" at line ").next().unwrap_or_default().to_owned();
        StateError::Damaged { path: path.to_owned(), line, column, what }
    };
    let Versioned { version } = serde_json::from_slice(text).map_err(damaged)?;
    if version != VERSION {
        let what = format!("it has version {version}, this daemon reads version {VERSION}");
        return Err(StateError::Unusable { path: path.to_owned(), what });
    }
    serde_json::from_slice(text).map_err(damaged)
}

/// Formats an error with the name of its object, because the error has no position in a file.
fn named(config: &Config, key: &Key, what: &str) -> String {
    let name = match (key.table, key.index) {
        ("vm", Some(index)) => config.vms.get(index).map(|vm| format!("VM `{}`", vm.name)),
        ("tenant", Some(index)) => config.tenants.get(index).map(|tenant| format!("tenant `{}`", tenant.name)),
        ("card", Some(index)) => config.cards.get(index).map(|card| format!("card `{}`", card.name)),
        _ => None,
    };
    let name = name.unwrap_or_else(|| key.table.to_owned());
    let kept = match key.field {
        "" => String::new(),
        field => format!("{field}: "),
    };
    format!("  {name}: {kept}{what}")
}
