//! `hearth metrics`: all figures for Prometheus, printed or over TCP.
//!
//! Over TCP they are a process of their own, which asks the daemon over its control socket as anybody may:
//! nothing that strangers send reaches the process that serves disks. Health is the second service's, and put in here.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use hearth_daemon::client::Client;
use hearth_daemon::error::Error;
use hearth_health::Report;
use hearth_metrics::{Form, Judged, with_health};
use hearth_monitor::dirs;
use hearth_monitor::watch::Seen;

use crate::args::{Global, Metrics};
use crate::{Outcome, overview};

/// Longest wait for a client to send, or to take, something.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest wait for the second service: less than Prometheus waits for all of it.
const SECOND_PATIENCE: Duration = Duration::from_secs(3);
/// Longest request that is read.
const REQUEST_MAX: u64 = 16 << 10;

pub fn run(global: &Global, args: &Metrics) -> Outcome {
    let source = Source::new(global);
    let Some(at) = args.listen else {
        print!("{}", source.page(Form::Plain)?);
        return Ok(());
    };
    if !at.ip().is_loopback() && !args.allow_remote {
        return Err(Error::refused(
            format!("{at} can be reached from other hosts"),
            "listen on 127.0.0.1, or add --allow-remote if that is what you want",
        )
        .into());
    }
    let listener = TcpListener::bind(at).map_err(|e| {
        Error::unavailable(
            format!("cannot listen on {at}: {e}"),
            "choose another address or port",
        )
    })?;
    let at = listener.local_addr().unwrap_or(at);
    eprintln!("answering at http://{at}/metrics");
    // One after the other: a scrape is rare, and who is slow is cut off.
    for stream in listener.incoming() {
        match stream {
            // Whoever went away needs no answer.
            Ok(stream) => drop(answer(&source, &stream)),
            // No descriptors, perhaps: not at once again.
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
    Ok(())
}

/// Who is asked for what is on a page.
struct Source {
    daemon: Client,
    second: Client,
}

impl Source {
    fn new(global: &Global) -> Source {
        let second = Client::new(&dirs::run_dir(&global.dir()));
        Source {
            daemon: Client::new(&global.dir()),
            second: second.patient_for(SECOND_PATIENCE),
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

/// What a client asks: the path, and what it accepts.
fn request(stream: impl Read) -> std::io::Result<Option<(String, Option<String>)>> {
    let mut lines = BufReader::new(stream.take(REQUEST_MAX)).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    let mut accept = None;
    // To the empty line, or the client would find its connection broken.
    for line in lines {
        let line = line?;
        if line.is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("accept")
        {
            accept = Some(value.trim().to_owned());
        }
    }
    let mut words = first.split(' ');
    let path = (words.next() == Some("GET"))
        .then(|| words.next())
        .flatten();
    Ok(path.map(|p| (p.to_owned(), accept)))
}

fn answer(source: &Source, mut stream: &TcpStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let asked = request(stream)?;
    let plain = Form::Plain.content_type();
    let (status, kind, body) = match asked {
        Some((path, accept)) if path == "/metrics" => {
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
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_all_sorts() {
        let asked = |text: &str| request(text.as_bytes()).unwrap();
        assert_eq!(
            asked("GET /metrics HTTP/1.1\r\nHost: h\r\naccept: a/b\r\n\r\nrest"),
            Some(("/metrics".to_owned(), Some("a/b".to_owned())))
        );
        assert_eq!(asked("GET /metrics"), Some(("/metrics".to_owned(), None)));
        assert_eq!(asked("POST /metrics HTTP/1.1\r\n\r\n"), None);
        assert_eq!(asked(""), None);
        assert!(request(&b"GET /\xff HTTP/1.1\r\n"[..]).is_err());
        let endless = std::io::repeat(b'a');
        assert_eq!(request(endless).unwrap(), None);
    }
}
