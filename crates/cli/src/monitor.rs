//! `hearth monitor`: the second service, with the parts it is made of.

use std::path::Path;
use std::sync::Arc;

use hearth_alerts::AlertsConfig;
use hearth_console::Reach;
use hearth_daemon::error::Error;
use hearth_health::daemon::Limits;
use hearth_monitor::alerts::{Alerting, Beating};
use hearth_monitor::collect::{Collecting, DrivesConfig};
use hearth_monitor::health::{Judging, Verdict};
use hearth_monitor::history::Remembering;
use hearth_monitor::memory::Telling;
use hearth_monitor::{Options, Part};
use serde::Deserialize;

use crate::args::{Global, Monitor};
use crate::metrics::{MetricsConfig, Scraped};
use crate::serve::log_to_stderr;
use crate::{Outcome, console, section};

/// What the file says that is our business.
#[derive(Debug, Default, Deserialize)]
pub struct File {
    /// Who is told.
    #[serde(default)]
    pub alerts: AlertsConfig,
    /// Where Prometheus may ask.
    #[serde(default)]
    pub metrics: MetricsConfig,
    /// What users of the console may reach.
    #[serde(default)]
    pub console: Reach,
    /// How smartctl reaches drives.
    #[serde(default)]
    pub drives: DrivesConfig,
}

pub fn run(global: &Global, args: Monitor) -> Outcome {
    log_to_stderr(args.log.as_deref(), args.log_format)?;
    let file = config(args.config.as_deref())?;
    Ok(hearth_monitor::run(Options {
        run_dir: global.dir(),
        state_dir: args
            .state_dir
            .map(|dir| std::path::absolute(&dir).unwrap_or(dir)),
        control_group: args.control_group,
        parts: parts(global, file),
    })?)
}

/// Our sections. A file that was named must be there.
pub fn config(given: Option<&Path>) -> Result<File, Error> {
    let remedy = "see docs/alerts.md, docs/health.md, docs/metrics.md and docs/console.md";
    section::read(given, remedy, |file: &File| {
        file.alerts.check()?;
        file.metrics.check()?;
        file.console.check()?;
        file.drives.check()
    })
}

/// What the second service does besides watching the daemon. Another part is another line here.
fn parts(global: &Global, file: File) -> Vec<Arc<dyn Part>> {
    let File {
        alerts,
        metrics,
        console: reach,
        drives,
    } = file;
    let collecting = Collecting::new(drives);
    let verdict = Verdict::default();
    let judging = Judging {
        verdict: verdict.clone(),
        findings: collecting.findings.clone(),
        limits: Limits {
            dirty_age: alerts.dirty_hours as f64 * 3600.0,
            ..Limits::default()
        },
    };
    let mut parts: Vec<Arc<dyn Part>> = vec![
        Arc::new(collecting),
        Arc::new(judging),
        Arc::new(Arc::new(Remembering::default())),
        Arc::new(Telling {
            dir: hearth_memory_host::run_dir(&global.dir()),
        }),
        Arc::new(console::Shown(reach)),
    ];
    if let Some(at) = metrics.listen {
        let names = metrics.names;
        parts.push(Arc::new(Scraped { at, names }));
    }
    if let Some(url) = alerts.heartbeat_url.clone() {
        parts.push(Arc::new(Beating { url }));
    }
    parts.push(Arc::new(Arc::new(Alerting::new(alerts, verdict))));
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistake_in_the_file_is_told_with_its_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hearth.toml");
        std::fs::write(&path, "[serve]\nthreads = 2\n[alerts]\nrepeat_hours = 12\n").unwrap();
        assert_eq!(config(Some(&path)).unwrap().alerts.repeat_hours, 12);
        std::fs::write(
            &path,
            "[alerts]\n[alerts.mail]\nto = ['a@b.c']\npassword = 'x'\n",
        )
        .unwrap();
        let error = config(Some(&path)).unwrap_err();
        assert!(error.what.contains("line 4"), "{error}");
        assert!(
            error.what.contains("password_file"),
            "what is allowed: {error}"
        );
        assert!(config(Some(&dir.path().join("none"))).is_err());
        std::fs::write(&path, "[console]\nallow_path = ['/']\n").unwrap();
        let error = config(Some(&path)).unwrap_err();
        assert!(error.what.contains("console.allow_path"), "{error}");
        for wrong in [
            "sda = 'x; reboot'",
            "sda = ['sat', '-a']",
            "'../sda' = 'sat'",
        ] {
            std::fs::write(&path, format!("[drives]\n{wrong}\n")).unwrap();
            let error = config(Some(&path)).unwrap_err();
            assert!(error.what.contains("drives"), "{wrong}: {error}");
        }
        std::fs::write(&path, "[drives]\nsda = 'sat'\nsdb = ['megaraid,0']\n").unwrap();
        assert!(config(Some(&path)).is_ok());
        std::fs::write(&path, "[console]\nallow_paths = ['/srv']\n").unwrap();
        let error = config(Some(&path)).unwrap_err();
        assert!(
            error.what.contains("line 2") && error.what.contains("allow_path"),
            "{error}"
        );
    }
}
