//! Prometheus, and the proxy between it and a daemon. Both are unpacked from Debian packages, and run with the dynamic
//! loader from these packages.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::apt::{self, Apt};
use crate::cache::{Cache, key};
use crate::exec;
use crate::hooks::{library_folders, loader};
use crate::progress::Progress;
use crate::recipe::{Made, MonitoringRecipe, Record, Suite};

/// Version of the recipe. It must be incremented when the recipe's result changes.
const VERSION: &str = "1";

/// The programs of a monitoring host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Monitoring {
    root: PathBuf,
}

impl Monitoring {
    /// Returns the server's command, without arguments.
    ///
    /// # Errors
    /// Returns an error if the packages contain no dynamic loader.
    pub fn prometheus(&self) -> Result<Command> {
        self.command("usr/bin/prometheus")
    }

    /// Returns the command that checks the server's configuration and metrics.
    ///
    /// # Errors
    /// Returns the same errors as [`Self::prometheus`].
    pub fn promtool(&self) -> Result<Command> {
        self.command("usr/bin/promtool")
    }

    /// Returns the proxy's command.
    ///
    /// # Errors
    /// Returns the same errors as [`Self::prometheus`].
    pub fn nginx(&self) -> Result<Command> {
        self.command("usr/sbin/nginx")
    }

    fn command(&self, program: &str) -> Result<Command> {
        let libraries = library_folders(&self.root);
        let mut command = Command::new(loader(&libraries)?);
        command.arg("--library-path").arg(std::env::join_paths(&libraries).context("library folders")?);
        command.arg(self.root.join(program));
        Ok(command)
    }

    /// Returns an error unless all programs run on this host.
    fn check(self) -> Result<Self> {
        let asked = [(self.prometheus()?, "--version"), (self.promtool()?, "--version"), (self.nginx()?, "-v")];
        for (mut command, version) in asked {
            if exec::probe(command.arg(version)).is_none() {
                bail!("a program of the packages in {} cannot be run: {command:?}", self.root.display());
            }
        }
        Ok(self)
    }
}

/// Finds the programs in the cache, or fetches and unpacks them.
pub fn ensure(
    recipe: &MonitoringRecipe,
    cache: &Cache,
    record: &mut Record,
    progress: &Progress,
) -> Result<Monitoring> {
    if let Some(made) = record.monitoring.as_ref().filter(|made| made.recipe == VERSION)
        && let Some(root) = cache.find("monitoring", &made.key)
        && let Ok(found) = (Monitoring { root }).check()
    {
        return Ok(found);
    }
    let (monitoring, made) = apt::first_of(&recipe.from, |suite| make(recipe, suite, cache, progress))?;
    record.monitoring = Some(made);
    Ok(monitoring)
}

fn make(recipe: &MonitoringRecipe, suite: &Suite, cache: &Cache, progress: &Progress) -> Result<(Monitoring, Made)> {
    let apt = Apt::open(suite, cache, progress)?;
    let unpack = |folder: &Path| -> Result<Vec<_>> {
        let unpacked = recipe.packages.iter().map(|name| {
            let fetched = apt.fetch_one(name, progress)?;
            let mut step = progress.step(format!("unpacking {name}"));
            apt::unpack(&fetched, folder, &mut step)?;
            Ok(fetched.package)
        });
        unpacked.collect()
    };
    // The package versions are known only after the download, so the key depends only on the recipe. New package
    // versions are used only if a refresh is requested.
    let inputs = [VERSION, suite.target()].into_iter().chain(recipe.packages.iter().map(String::as_str));
    let key = key(&inputs.collect::<Vec<_>>());
    let mut packages = Vec::new();
    let root = cache.make("monitoring", &key, |folder| {
        packages = unpack(folder)?;
        Ok(())
    })?;
    apt.clean()?;
    let monitoring = Monitoring { root }.check()?;
    progress.line("images: Prometheus and its proxy are ready");
    Ok((monitoring, Made { recipe: VERSION.into(), key, suite: suite.target().into(), packages }))
}
