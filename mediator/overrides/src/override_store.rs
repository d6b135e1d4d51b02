//! Stored state of a running daemon. It is read at startup and written after each change.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::store::{Store, StoreError};
use super::{Live, State, VERSION};
use config::Config;
use config::check::{self, Key};

/// Reason why the daemon cannot start with the stored state.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages document the variants")]
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

/// Advice for an unusable file.
const ADVICE: &str = "replace it with a good copy, or start once with --ignore-state, which renames it";

/// Store for changes, if the configuration sets a folder for it.
#[derive(Debug, Default)]
pub struct OverrideStore {
    /// The configuration file as read at startup.
    file: Config,
    store: Option<Store>,
    /// Last written content, so that unchanged content is not written again; `None` if unknown.
    written: Option<State>,
}

impl OverrideStore {
    /// Reads the stored changes from the configured folder. Returns the configuration with the changes applied. If
    /// `ignore` is true, the file with the stored changes is renamed and not used.
    ///
    /// # Errors
    /// Returns an error if the stored changes cannot be read, are corrupt, or conflict with the configuration. Never
    /// guesses values.
    pub fn open(file: Config, ignore: bool) -> Result<(Config, Self), StateError> {
        let Some(folder) = &file.daemon.state_dir else {
            tracing::info!(
                "no `state_dir` is configured: changes of VMs and limits at run time are lost when the daemon exits"
            );
            return Ok((file.clone(), Self { file, store: None, written: None }));
        };
        let store = Store::open(folder)?;
        if ignore && let Some(path) = store.set_aside()? {
            tracing::warn!(path = %path.display(), "renamed the state file, as requested");
        }
        let written = match store.read()? {
            None => State::default(),
            Some(text) => parsed(&text, &store.path())?,
        };
        let config = applied(&written, &file, &store.path())?;
        let mut override_store = Self { file, store: Some(store), written: Some(written) };
        // Changes that no longer apply must not reappear after another edit of the file.
        override_store.keep(&Live::from_config(&config))?;
        Ok((config, override_store))
    }

    /// Takes over the store of another daemon, which reported `state` as its content. `lock` is that daemon's lock on
    /// its folder. Returns the configuration with the changes applied.
    ///
    /// # Errors
    /// Returns an error if the stored changes conflict with the configuration.
    pub fn handed(file: Config, state: &str, lock: Option<File>) -> Result<(Config, Self), StateError> {
        let folder = file.daemon.state_dir.clone();
        let place = folder.clone().unwrap_or_else(|| PathBuf::from("the changes made at run time"));
        let written = parsed(state.as_bytes(), &place)?;
        let store = match (&folder, lock) {
            (None, _) => None,
            (Some(folder), Some(lock)) if Store::is_lock_of(&lock, folder) => Some(Store::with_lock(folder, lock)),
            // The other daemon had no folder, or a different one.
            (Some(folder), _) => Some(Store::open(folder)?),
        };
        let config = applied(&written, &file, &place)?;
        // The other daemon may not have written the state.
        Ok((config, Self { file, store, written: None }))
    }

    /// Returns the lock on the folder, if any.
    pub fn lock(&self) -> Option<&File> {
        self.store.as_ref().map(Store::lock)
    }

    /// Returns the differences from the configuration file in their stored form.
    ///
    /// # Errors
    /// Returns an error if a value cannot be represented as JSON.
    pub fn state(&self, now: &Live) -> Result<String, StateError> {
        let unusable = |what| StateError::Unusable { path: PathBuf::from("the changes made at run time"), what };
        let state = State::between(&self.file, now).map_err(unusable)?;
        serde_json::to_string(&state).map_err(|error| unusable(error.to_string()))
    }

    /// Writes the current settings unless they are already stored.
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

/// Applies the changes in a state, which was read from `path`, to the configuration file.
fn applied(state: &State, file: &Config, path: &Path) -> Result<Config, StateError> {
    let unusable = |what| StateError::Unusable { path: path.to_owned(), what };
    let (config, forgotten) = state.applied(file).map_err(unusable)?;
    for what in &forgotten {
        tracing::warn!("dropped a stored change: {what}");
    }
    let mistakes = check::config(&config);
    if mistakes.is_empty() {
        return Ok(config);
    }
    let named = mistakes.iter().map(|mistake| named(&config, &mistake.key, &mistake.what));
    Err(StateError::Misfit { path: path.to_owned(), mistakes: named.collect() })
}

/// Parses a state file.
pub(super) fn parsed(text: &[u8], path: &Path) -> Result<State, StateError> {
    // A state of another version may have different keys, so report the version instead of the keys.
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
        let what = format!("it has version {version}, but this daemon reads version {VERSION}");
        return Err(StateError::Unusable { path: path.to_owned(), what });
    }
    serde_json::from_slice(text).map_err(damaged)
}

/// Formats an error with the name of its object, because it has no position in a file.
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
