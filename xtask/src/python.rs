//! The Python client, which is generated from the API description without handwritten code and packed as a wheel.
//!
//! The generator and the wheel builder come from the Python registry. They are installed in a cache folder, so neither
//! root nor a virtual environment is required.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::run::{root, target};

/// The client generator, and the wheel builder that its output requires.
const GENERATOR: [&str; 2] = ["openapi-python-client==0.29.1", "poetry-core==2.5.0"];
/// Helm as a library, and the schemas of Kubernetes objects.
const HELM: [&str; 2] = ["helm-sdkpy==0.1.32", "kubernetes-validate==1.37.0"];
/// Path of the API description.
const DOCUMENT: &str = "docs/reference/api.json";
/// Name of the Python package.
const PACKAGE: &str = "gpu_mediator_client";

/// Creates the wheel in `out`, or in the default package folder. Prints the wheel's path, and the folder with the
/// packages that it needs.
///
/// # Errors
/// Returns an error if Python or pip is missing, the registry does not respond, or the generator cannot read the
/// description.
pub fn client(out: Option<&Path>) -> Result<bool> {
    let tools = tools(&GENERATOR, &[]).context("the generator of the Python client")?;
    let out = out.map_or_else(|| target().join("package"), Path::to_owned);
    fs::create_dir_all(&out).with_context(|| format!("cannot create {}", out.display()))?;
    let work = tempfile::tempdir().context("a folder for the client")?;
    let path = |name: &str| work.path().join(name);
    let config = format!(
        "project_name_override: gpu-mediator-client\npackage_name_override: {PACKAGE}\npackage_version_override: {}\npost_hooks: []\n",
        env!("CARGO_PKG_VERSION")
    );
    fs::write(path("config.yml"), config).context("the generator's configuration")?;
    let mut generate = python(Some(&tools));
    generate.args(["-m", "openapi_python_client", "generate", "--path"]).arg(root().join(DOCUMENT));
    generate.arg("--config").arg(path("config.yml")).arg("--output-path").arg(path("client"));
    run(&mut generate)?;
    let mut pack = python(Some(&tools));
    pack.args(["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]);
    run(pack.arg(path("wheels")).arg(path("client")))?;
    let made: Vec<PathBuf> = fs::read_dir(path("wheels"))?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    let [made] = &made[..] else { bail!("pip built {} wheels instead of one", made.len()) };
    let wheel = out.join(made.file_name().context("a wheel has a name")?);
    fs::copy(made, &wheel).with_context(|| format!("cannot write {}", wheel.display()))?;
    println!("{}", wheel.display());
    println!("{}", tools.display());
    Ok(true)
}

/// Prints the folder with the Python packages that render and validate the Helm chart.
///
/// # Errors
/// Returns an error if Python or pip is missing, or the registry does not respond.
pub fn helm() -> Result<bool> {
    // Helm's library claims to require a newer Python than Debian 12's, but also works with Debian's.
    println!("{}", tools(&HELM, &["--ignore-requires-python"]).context("Helm's library")?.display());
    Ok(true)
}

/// Returns the folder with the given Python packages. Installs them on first use.
fn tools(packages: &[&str], options: &[&str]) -> Result<PathBuf> {
    let cache = std::env::var_os("GPU_MEDIATOR_CACHE").map_or_else(|| root().join(".cache"), PathBuf::from);
    let folder = cache.join("python").join(packages.join("-").replace("==", "-"));
    if folder.exists() {
        return Ok(folder);
    }
    let parent = folder.parent().context("a cache")?;
    fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    // Install to a temporary folder, so that an interrupted installation does not leave a folder with the final name.
    let scratch = tempfile::tempdir_in(parent).context("a folder for Python packages")?;
    let place = scratch.path().join("tools");
    let mut install = python(None);
    install.args(["-m", "pip", "install", "--quiet"]).args(options).arg("--target").arg(&place);
    run(install.args(packages)).context("cannot be installed; it needs python3 with pip")?;
    match fs::rename(&place, &folder) {
        // Another process has already created the folder.
        Err(_) if folder.exists() => Ok(folder),
        renamed => renamed.map(|()| folder).context("cannot keep the Python packages"),
    }
}

/// Returns a command that runs Python with the packages in a folder.
fn python(packages: Option<&Path>) -> Command {
    let mut command = Command::new("python3");
    match packages {
        Some(folder) => command.env("PYTHONPATH", folder),
        None => command.env_remove("PYTHONPATH"),
    };
    command.env("PIP_ROOT_USER_ACTION", "ignore").env("PIP_DISABLE_PIP_VERSION_CHECK", "1");
    command
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    ensure!(output.status.success(), "{command:?} failed ({}):\n{said}", output.status);
    Ok(())
}
