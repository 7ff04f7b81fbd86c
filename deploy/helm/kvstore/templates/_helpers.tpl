{{- define "kvstore.labels" -}}
app.kubernetes.io/name: kvstore
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
{{- define "kvstore.selector" -}}
app.kubernetes.io/name: kvstore
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "kvstore.image" -}}
{{- $repository := required "image.repository: say where you have pushed the image `store` (docs/kubernetes.md)" .Values.image.repository -}}
{{- if .Values.image.digest -}}{{ $repository }}@{{ .Values.image.digest }}
{{- else -}}{{ $repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end -}}
{{- end }}
{{- define "kvstore.url" -}}
{{ .Values.redis.url | default (printf "redis://redis-%s:6379" .Release.Name) }}
{{- end }}
