//! `hearth metrics`: all figures for Prometheus, printed or over TCP.
//!
//! Over TCP they come from a process of their own or from the second service, which ask the daemon over its control socket
//! as anybody may: nothing that strangers send reaches the process that serves disks. Health is the second service's,
//! and put in here.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearth_daemon::client::Client;
use hearth_daemon::error::Error;
use hearth_health::Report;
use hearth_io::limiter::{Limiter, Place};
use hearth_io::peer::user;
use hearth_io::until::Until;
use hearth_metrics::{Form, Judged, with_health};
use hearth_monitor::part::Context;
use hearth_monitor::watch::Seen;
use hearth_monitor::{Part, dirs};
use serde::{Deserialize, Serialize};

use crate::args::{Global, Metrics};
use crate::{Outcome, overview, print_json};

/// Longest wait for a client to send its request, or to take the answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest wait for the second service: less than Prometheus waits for all of it.
const SECOND_PATIENCE: Duration = Duration::from_secs(3);
/// Longest request that is read.
const REQUEST_MAX: u64 = 16 << 10;

pub fn run(global: &Global, args: &Metrics) -> Outcome {
    let client = Client::new(&global.dir());
    let source = Arc::new(Source::new(client, &global.dir(), args.names.clone()));
    let Some(at) = args.listen else {
        let page = source.page(Form::Plain)?;
        if global.json {
            return print_json(&Families::of(&page));
        }
        print!("{page}");
        return Ok(());
    };
    if let Some(what) = too_far(at, args.allow_remote) {
        return Err(Error::refused(
            what,
            "listen on 127.0.0.1, or add --allow-remote if that is what you want",
        )
        .into());
    }
    let (listener, at) = bind(at)?;
    eprintln!("answering at http://{at}/metrics");
    serve(&source, &listener, || false);
    Ok(())
}

/// All figures as JSON.
#[derive(Debug, Default, Serialize)]
struct Families {
    metrics: Vec<Family>,
}

/// One figure with all that it is told of.
#[derive(Debug, Default, Serialize)]
struct Family {
    name: String,
    help: String,
    #[serde(rename = "type")]
    kind: String,
    samples: Vec<Sample>,
}

#[derive(Debug, Serialize)]
struct Sample {
    /// With what a histogram's series end in: `_bucket`, `_sum`, `_count`.
    name: String,
    labels: BTreeMap<String, String>,
    /// `null` for what is not a finite number.
    value: Option<f64>,
}

impl Families {
    /// Of a page in Prometheus' text form.
    fn of(page: &str) -> Families {
        let mut all = Families::default();
        for line in page.lines() {
            let words = |text: &str| -> Option<(String, String)> {
                let (name, rest) = text.split_once(' ')?;
                Some((name.to_owned(), rest.to_owned()))
            };
            if let Some((name, text)) = line.strip_prefix("# HELP ").and_then(words) {
                all.family(&name).help = unescaped(&text);
            } else if let Some((name, text)) = line.strip_prefix("# TYPE ").and_then(words) {
                all.family(&name).kind = text;
            } else if let Some(sample) = sample(line) {
                let last = all.metrics.last_mut();
                match last.filter(|family| sample.name.starts_with(&family.name)) {
                    Some(family) => family.samples.push(sample),
                    None => all.family(&sample.name.clone()).samples.push(sample),
                }
            }
        }
        all
    }

    /// The family of this name: the last one, or a new one.
    fn family(&mut self, name: &str) -> &mut Family {
        if self.metrics.last().is_none_or(|last| last.name != name) {
            self.metrics.push(Family {
                name: name.to_owned(),
                ..Family::default()
            });
        }
        let last = self.metrics.len() - 1;
        &mut self.metrics[last]
    }
}

fn unescaped(text: &str) -> String {
    let mut out = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (c, c == '\\') {
            (_, true) => match chars.next() {
                Some('n') => out.push('\n'),
                Some(other) => out.push(other),
                None => {}
            },
            (c, false) => out.push(c),
        }
    }
    out
}

/// A line such as `name{label="value"} 1`; `None` for comments and empty lines.
fn sample(line: &str) -> Option<Sample> {
    if line.is_empty() || line.starts_with('#') {
        return None;
    }
    let (head, value) = line.rsplit_once(' ')?;
    let (name, mut rest) = match head.split_once('{') {
        Some((name, rest)) => (name, rest.strip_suffix('}')?),
        None => (head, ""),
    };
    let mut labels = BTreeMap::new();
    while let Some((label, after)) = rest.split_once("=\"") {
        // The quote that ends it has an even number of backslashes before it.
        let is_end = |at: &usize| {
            let before = after[..*at].bytes().rev();
            before.take_while(|b| *b == b'\\').count() % 2 == 0
        };
        let end = after.match_indices('"').map(|(at, _)| at).find(is_end)?;
        labels.insert(label.to_owned(), unescaped(&after[..end]));
        rest = after[end + 1..].trim_start_matches(',');
    }
    Some(Sample {
        name: name.to_owned(),
        labels,
        value: value.parse().ok().filter(|value: &f64| value.is_finite()),
    })
}

/// Why this address is not to be listened on.
fn too_far(at: SocketAddr, allowed: bool) -> Option<String> {
    (!at.ip().is_loopback() && !allowed).then(|| format!("{at} can be reached from other hosts"))
}

fn bind(at: SocketAddr) -> Result<(TcpListener, SocketAddr), Error> {
    let listener = hearth_io::peer::listen(at).map_err(|e| {
        Error::unavailable(
            format!("cannot listen on {at}: {e}"),
            "choose another address or port",
        )
    })?;
    let at = listener.local_addr().unwrap_or(at);
    Ok((listener, at))
}

/// Answers clients at the same time until it is over. When there are as many as allowed, the one that has not sent its request
/// for the longest time makes room: silent clients must not keep Prometheus out.
fn serve(source: &Arc<Source>, listener: &TcpListener, over: impl Fn() -> bool) {
    let limiter = Limiter::new(CLIENTS_MAX, CLIENTS_OF_ONE);
    for stream in listener.incoming() {
        if over() {
            return;
        }
        let admitted = stream.and_then(|stream| {
            let user = user(stream.local_addr()?, stream.peer_addr()?);
            let place = limiter.enter(user).ok_or(ErrorKind::ResourceBusy)?;
            let other = stream.try_clone()?;
            // The thread of a connection ends with it.
            place.ends_with(move || drop(other.shutdown(Shutdown::Both)));
            let source = source.clone();
            let thread = std::thread::Builder::new().name("metrics".to_owned());
            // A client that went away needs no answer.
            thread.spawn(move || drop(answer(&source, &stream, &place)))
        });
        match admitted {
            // Its places are taken, or it went away.
            Err(e) if matches!(e.kind(), ErrorKind::ResourceBusy | ErrorKind::NotConnected) => {}
            // No descriptors or threads, perhaps: not at once again.
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
            Ok(_) => {}
        }
    }
}

/// Clients at the same time, of all and of one user: an address, or an account of this host.
const CLIENTS_MAX: usize = 32;
const CLIENTS_OF_ONE: usize = 16;

/// The section `[metrics]` of the host's file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MetricsConfig {
    /// Where the second service answers `GET /metrics`, if anywhere.
    pub listen: Option<SocketAddr>,
    /// Other hosts may reach it.
    pub allow_remote: bool,
    /// Names of this host under which it is asked, beside its own.
    pub names: Vec<String>,
}

impl MetricsConfig {
    /// What is wrong with it.
    pub fn check(&self) -> Result<(), String> {
        match self.listen.and_then(|at| too_far(at, self.allow_remote)) {
            Some(what) => Err(format!(
                "metrics.listen: {what}; listen on 127.0.0.1, or add allow_remote = true"
            )),
            None => Ok(()),
        }
    }
}

/// Metrics over TCP, as a part of the second service.
pub struct Scraped {
    /// Where it listens.
    pub at: SocketAddr,
    /// As in [`MetricsConfig::names`].
    pub names: Vec<String>,
}

impl Part for Scraped {
    fn name(&self) -> &'static str {
        "metrics"
    }

    fn run(&self, context: &Context) -> Result<(), Error> {
        let (listener, at) = bind(self.at)?;
        let stop = context.stop.clone();
        // Whoever waits for a client sees the end only by one that comes.
        std::thread::Builder::new()
            .name("mon-metrics-end".to_owned())
            .spawn(move || {
                stop.wait_for_it();
                // Nobody may be listening any more.
                let _ = TcpStream::connect(at);
            })
            .map_err(|e| Error::internal(format!("cannot start a thread: {e}")))?;
        let daemon = Client::of_second(&context.run_dir);
        let source = Arc::new(Source::new(daemon, &context.run_dir, self.names.clone()));
        serve(&source, &listener, || context.stop.is_told());
        Ok(())
    }
}

/// Who is asked for what is on a page.
struct Source {
    daemon: Client,
    second: Client,
    /// Under which it is asked.
    names: Vec<String>,
}

impl Source {
    fn new(daemon: Client, run_dir: &Path, mut names: Vec<String>) -> Source {
        names.extend(["localhost".to_owned(), hearth_monitor::alerts::host_name()]);
        let second = Client::new(&dirs::run_dir(run_dir));
        Source {
            daemon,
            second: second.patient_for(SECOND_PATIENCE),
            names,
        }
    }

    fn page(&self, form: Form) -> Result<String, Error> {
        let page = self
            .daemon
            .accepting(form.content_type())
            .text("/metrics")?;
        // One that hangs or is not there costs what only it knows.
        let report = match self.second.get::<Report>("/v1/health") {
            Ok(report) => report,
            Err(_) => overview::judged(Some(&Seen::ask(&self.daemon)?), None),
        };
        let judged = report.items.iter().map(|item| Judged {
            kind: item.kind.label(),
            name: &item.name,
            code: item.condition.code(),
        });
        Ok(with_health(form, page, judged))
    }
}

/// True if a request is for this host. A page of another site can have a browser ask here under a name of its own that it
/// made an address of this host (DNS rebinding), and read the answer; it cannot have it ask for an address.
fn is_ours(host: &str, names: &[String]) -> bool {
    if host.parse::<SocketAddr>().is_ok() || host.parse::<IpAddr>().is_ok() {
        return true;
    }
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.chars().all(|c| c.is_ascii_digit()) => name,
        _ => host,
    };
    let bare = name.strip_prefix('[').and_then(|n| n.strip_suffix(']'));
    bare.is_some_and(|address| address.parse::<IpAddr>().is_ok())
        || names.iter().any(|own| own.eq_ignore_ascii_case(name))
}

/// What a client asks.
#[derive(Debug, PartialEq, Eq)]
struct Request {
    path: String,
    accept: Option<String>,
    host: Option<String>,
}

fn request(stream: impl Read) -> std::io::Result<Option<Request>> {
    let mut lines = BufReader::new(stream.take(REQUEST_MAX)).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    let (mut accept, mut host) = (None, None);
    // To the empty line, or the client would find its connection broken.
    for line in lines {
        let line = line?;
        if line.is_empty() {
            break;
        }
        let Some((name, value)) = line.split_once(':') else {
            continue;
        };
        let value = value.trim().to_owned();
        if name.eq_ignore_ascii_case("accept") {
            accept = Some(value);
        } else if name.eq_ignore_ascii_case("host") {
            host = Some(value);
        }
    }
    let mut words = first.split(' ');
    let path = (words.next() == Some("GET"))
        .then(|| words.next())
        .flatten();
    Ok(path.map(|path| Request {
        path: path.to_owned(),
        accept,
        host,
    }))
}

fn answer(source: &Source, stream: &TcpStream, place: &Place) -> std::io::Result<()> {
    let mut stream = Until::new(stream, Instant::now() + PATIENCE);
    let asked = request(&mut stream)?;
    place.waits(false);
    let plain = Form::Plain.content_type();
    let (status, kind, body) = match asked {
        Some(Request {
            host: Some(host), ..
        }) if !is_ours(&host, &source.names) => (
            "421 Misdirected Request",
            plain,
            "this host is not known under that name; ask for its address, or list the name: names in [metrics] of \
             /etc/hearth/hearth.toml, or --name\n"
                .to_owned(),
        ),
        Some(Request { path, accept, .. }) if path == "/metrics" => {
            let form = Form::accepted(accept.as_deref());
            match source.page(form) {
                Ok(page) => ("200 OK", form.content_type(), page),
                Err(e) => ("503 Service Unavailable", plain, format!("{e}\n")),
            }
        }
        _ => (
            "404 Not Found",
            plain,
            "there is only GET /metrics\n".to_owned(),
        ),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    // The figures may have taken long themselves.
    stream.extend(Instant::now() + PATIENCE);
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_json_when_asked() {
        let page = "# HELP hearth_up Whether it \\\\ is.\n# TYPE hearth_up gauge\nhearth_up 1\n\
            # HELP hearth_t Times.\n# TYPE hearth_t histogram\n\
            hearth_t_bucket{disk=\"a \\\"b\\\", c=\\\\\",le=\"+Inf\"} 3\nhearth_t_sum{disk=\"x}\"} 0.5\n\
            hearth_t_count NaN\n";
        let json = serde_json::to_value(Families::of(page)).unwrap();
        assert_eq!(
            json,
            serde_json::json!({ "metrics": [
                { "name": "hearth_up", "help": "Whether it \\ is.", "type": "gauge", "samples": [
                    { "name": "hearth_up", "labels": {}, "value": 1.0 } ] },
                { "name": "hearth_t", "help": "Times.", "type": "histogram", "samples": [
                    { "name": "hearth_t_bucket",
                      "labels": { "disk": "a \"b\", c=\\", "le": "+Inf" }, "value": 3.0 },
                    { "name": "hearth_t_sum", "labels": { "disk": "x}" }, "value": 0.5 },
                    { "name": "hearth_t_count", "labels": {}, "value": null } ] },
            ] })
        );
    }

    #[test]
    fn other_hosts_are_let_in_only_if_that_is_said() {
        let check = |text: &str| toml::from_str::<MetricsConfig>(text).unwrap().check();
        assert_eq!(check(""), Ok(()));
        assert_eq!(check("listen = '[::1]:1'"), Ok(()));
        let told = check("listen = '0.0.0.0:9810'").unwrap_err();
        assert!(told.contains("allow_remote = true"), "{told}");
        assert_eq!(
            check("listen = '0.0.0.0:9810'\nallow_remote = true"),
            Ok(())
        );
        assert!(toml::from_str::<MetricsConfig>("listen = 'host'").is_err());
    }

    #[test]
    fn other_names_for_this_host_are_refused() {
        let names = ["localhost".to_owned(), "kvm1".to_owned()];
        for own in [
            "127.0.0.1:9810",
            "[::1]:9810",
            "[::1]",
            "192.0.2.1",
            "LOCALHOST:9810",
            "kvm1",
        ] {
            assert!(is_ours(own, &names), "{own}");
        }
        for other in [
            "rebound.example.org:9810",
            "kvm1.example.org",
            "127.0.0.1.example.org",
            "",
            ":9810",
            "[kvm1]",
        ] {
            assert!(!is_ours(other, &names), "{other}");
        }
    }

    #[test]
    fn requests_of_all_sorts() {
        let asked = |text: &str| request(text.as_bytes()).unwrap();
        let whole = Request {
            path: "/metrics".to_owned(),
            accept: Some("a/b".to_owned()),
            host: Some("h".to_owned()),
        };
        assert_eq!(
            asked("GET /metrics HTTP/1.1\r\nHost: h\r\naccept: a/b\r\n\r\nrest"),
            Some(whole)
        );
        let bare = asked("GET /metrics").unwrap();
        assert_eq!(
            (bare.path.as_str(), bare.accept, bare.host),
            ("/metrics", None, None)
        );
        assert_eq!(asked("POST /metrics HTTP/1.1\r\n\r\n"), None);
        assert_eq!(asked(""), None);
        assert!(request(&b"GET /\xff HTTP/1.1\r\n"[..]).is_err());
        let endless = std::io::repeat(b'a');
        assert_eq!(request(endless).unwrap(), None);
    }

    /// Silent clients, far more than there are places, do not keep out one that asks.
    #[test]
    fn silent_clients_keep_nobody_out() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = Client::new(dir.path());
        let source = Arc::new(Source::new(daemon, dir.path(), Vec::new()));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        std::thread::spawn(move || serve(&source, &listener, || false));
        let silent: Vec<TcpStream> = (0..10 * CLIENTS_MAX)
            .map(|_| TcpStream::connect(at).unwrap())
            .collect();
        let mut client = TcpStream::connect(at).unwrap();
        client
            .write_all(b"GET /else HTTP/1.1\r\nHost: localhost\r\n\r\n")
            .unwrap();
        let mut answer = String::new();
        // Far longer than it takes, and less than the silent ones are waited for.
        client
            .set_read_timeout(Some(PATIENCE - Duration::from_secs(1)))
            .unwrap();
        client.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
        drop(silent);
    }
}
